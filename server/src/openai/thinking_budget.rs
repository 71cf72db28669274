//! `thinking_token_budget`: forces the end-of-reasoning marker after a number of reasoning tokens.

use super::params::CompletionParams;
use super::submit::text_error;
use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::request_fields::RequestFields;
use grammar::{ReasoningTrackerFactory, ThinkingBudget};
use protocol::{SamplingParams, Token};
use std::sync::Arc;
use text::{Detokenizer, OutputParser, ReasoningFamily, ReasoningStart};

/// Thinking budget requested by a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestedThinkingBudget {
    /// Maximum number of reasoning tokens.
    pub tokens: u32,
    /// Name of the field that sets the budget.
    pub param: &'static str,
}

/// Thinking budget in force.
#[derive(Debug, Clone)]
pub(crate) struct ActiveThinkingBudget {
    /// Budget that forces the end marker.
    pub budget: ThinkingBudget,
    /// Name of the field that sets the budget.
    pub param: &'static str,
}

impl RequestedThinkingBudget {
    /// Takes `thinking_token_budget`.
    ///
    /// Errors: 400 if it is negative or not an integer.
    pub(crate) fn take(fields: &mut RequestFields) -> Result<Option<Self>, ApiError> {
        const NAME: &str = "thinking_token_budget";
        Self::take_named(fields, NAME, NAME)
    }

    /// Takes a budget from field `name`; `param`: the full path of the field.
    pub(crate) fn take_named(
        fields: &mut RequestFields,
        name: &str,
        param: &'static str,
    ) -> Result<Option<Self>, ApiError> {
        let tokens = fields.int(name, 0..=i64::from(u32::MAX))?;
        Ok(tokens.map(|tokens| Self { tokens: tokens as u32, param }))
    }

    /// Creates the budget of outputs that start in reasoning state `beginning` and are read by `parser`;
    /// `None` = they contain no more reasoning. `continued`: the message that they continue; its
    /// reasoning tokens count.
    ///
    /// Errors: 400 if there is no reasoning parser, or if the end marker cannot be forced.
    pub(crate) fn activate(
        self,
        serving: &ServingContext,
        params: &CompletionParams,
        (beginning, continued): (Option<ReasoningStart>, Option<&str>),
        (parser, detokenizer): (&OutputParser, Detokenizer),
    ) -> Result<Option<ActiveThinkingBudget>, ApiError> {
        let Self { tokens, param } = self;
        let Some(beginning) = beginning else {
            let message = "needs a model whose reasoning is told apart (--reasoning-parser)";
            return Err(ApiError::unsupported(param, message));
        };
        let Some(reader) = parser.reasoning_reader(detokenizer) else { return Ok(None) };
        let encode = |text: &str| {
            let ids = serving.tokenizer.encode(text, false);
            ids.map_err(|error| text_error(&error, param))
        };
        let begun = match (beginning, continued) {
            (ReasoningStart::Inside, Some(message)) => {
                encode(ReasoningFamily::trailing_reasoning(message))?.len() as u32
            }
            _ => 0,
        };
        let mark = encode(ReasoningFamily::END_MARKER)?;
        check_end_marker(serving, params, &mark, param)?;
        let reader: ReasoningTrackerFactory = Arc::new(move || Box::new(reader.clone()));
        let (tokens, vocab_size) = (tokens.saturating_sub(begun), serving.field_bounds.vocab_size);
        let budget =
            ThinkingBudget { tokens, end_marker: mark.into(), vocab_size, new_tracker: reader };
        Ok(Some(ActiveThinkingBudget { budget, param }))
    }
}

impl ActiveThinkingBudget {
    /// Rejects parameters that forbid the end marker: where it is forced, no other token is allowed.
    ///
    /// Errors: 400 naming the parameter.
    pub(crate) fn check(
        &self,
        sampling: &SamplingParams,
        stop_ids: &[Token],
    ) -> Result<(), ApiError> {
        let mark = &self.budget.end_marker;
        let forbids = |words: &[Vec<Token>]| {
            words.iter().any(|word| word.last().is_some_and(|last| mark.contains(last)))
        };
        let lacks = |ids: &Vec<Token>| mark.iter().any(|id| !ids.contains(id));
        let stops = mark.iter().any(|id| stop_ids.contains(id));
        let rule = if sampling.allowed_token_ids.as_ref().is_some_and(lacks) {
            "allowed_token_ids"
        } else if forbids(&sampling.bad_words) {
            "bad_words"
        } else if sampling.min_tokens > 0 && stops {
            "min_tokens"
        } else {
            return Ok(());
        };
        let message = format!("forbids the tokens {mark:?} that {} forces", self.param);
        Err(ApiError::invalid(rule, message))
    }
}

/// Rejects an end marker that would not end the reasoning.
fn check_end_marker(
    serving: &ServingContext,
    params: &CompletionParams,
    mark: &[Token],
    param: &'static str,
) -> Result<(), ApiError> {
    let (tokenizer, end) = (&serving.tokenizer, ReasoningFamily::END_MARKER);
    if !tokenizer.decode(mark, false).contains(end) {
        let message = format!("this model's tokenizer cannot write {end}");
        return Err(ApiError::unsupported(param, message));
    }
    // Grammars match the text of an output, and a special token has no text.
    match &params.constraint {
        Some(constraint) if mark.iter().any(|&id| tokenizer.is_special(id)) => {
            let message =
                format!("{end} is no text for {}, which begins behind it", constraint.param);
            Err(ApiError::unsupported(param, message))
        }
        _ => Ok(()),
    }
}
