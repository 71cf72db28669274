//! `thinking_token_budget`: once an output has this number of reasoning tokens, the end marker (`</think>`)
//! is forced. In the harmony format, reasoning may begin again after its end; then the opening of the answer
//! is forced too.

use super::submit::text_error;
use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::request_fields::RequestFields;
use grammar::{ReasoningTrackerFactory, ThinkingBudget};
use protocol::{SamplingParams, Token};
use std::sync::Arc;
use text::{Detokenizer, OutputParser, ReasoningFamily, ReasoningStart};

/// State at the start of an output: the reasoning state, and the message that the output continues.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutputStartState<'a> {
    /// Reasoning state at the start of the output; `None` = there is no reasoning parser.
    pub reasoning: Option<ReasoningStart>,
    /// Assistant message that the output continues, if any. The message's reasoning tokens count towards the
    /// budget.
    pub continued: Option<&'a str>,
}

/// Thinking budget set by a request, not yet checked against the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestedThinkingBudget {
    /// Maximum number of reasoning tokens.
    pub tokens: u32,
    /// Name of the request field that sets the budget.
    pub param: &'static str,
}

/// Thinking budget in force for the outputs of a request.
#[derive(Debug, Clone)]
pub(crate) struct ActiveThinkingBudget {
    /// Budget and end marker, in the form enforced by the grammar engine.
    pub budget: ThinkingBudget,
    /// Name of the request field that sets the budget.
    pub param: &'static str,
}

impl RequestedThinkingBudget {
    /// Parses `thinking_token_budget`.
    ///
    /// Errors: HTTP status 400 if the value is negative or not an integer.
    pub(crate) fn take(fields: &mut RequestFields) -> Result<Option<Self>, ApiError> {
        const NAME: &str = "thinking_token_budget";
        Self::take_named(fields, NAME, NAME)
    }

    /// Parses a thinking budget in field `name`; `param` is the full path of the field.
    pub(crate) fn take_named(
        fields: &mut RequestFields,
        name: &str,
        param: &'static str,
    ) -> Result<Option<Self>, ApiError> {
        let tokens = fields.int(name, 0..=i64::from(u32::MAX))?;
        Ok(tokens.map(|tokens| Self { tokens: tokens as u32, param }))
    }

    /// Creates the budget for outputs that begin in the state `start` and are parsed by `parser`; `None` if
    /// these outputs contain no further reasoning.
    ///
    /// Errors: HTTP status 400 if there is no reasoning parser, or if the end marker cannot be forced.
    pub(crate) fn activate(
        self,
        serving: &ServingContext,
        start: OutputStartState<'_>,
        parser: &OutputParser,
        detokenizer: Detokenizer,
    ) -> Result<Option<ActiveThinkingBudget>, ApiError> {
        let Self { tokens, param } = self;
        let (Some(reasoning), Some(family)) = (start.reasoning, serving.parsers.reasoning) else {
            let message = "needs --reasoning-parser";
            return Err(ApiError::unsupported(param, message));
        };
        let Some(reader) = parser.reasoning_reader(detokenizer) else { return Ok(None) };
        let reasoning_tokens = match (reasoning, start.continued) {
            (ReasoningStart::Inside, Some(message)) => {
                encode(serving, family.trailing_reasoning(message), param)?.len() as u32
            }
            _ => 0,
        };
        let end_marker = encode(serving, family.markers().close, param)?;
        check_end_marker(serving, family, &end_marker, param)?;
        let new_tracker: ReasoningTrackerFactory = Arc::new(move || Box::new(reader.clone()));
        let tokens = tokens.saturating_sub(reasoning_tokens);
        let vocab_size = serving.field_bounds.vocab_size;
        let end_marker = end_marker.into();
        let answer_opening = family.answer_opening().map(|text| encode(serving, text, param));
        let answer_opening = answer_opening.transpose()?.map(Arc::from);
        let budget = ThinkingBudget { tokens, end_marker, answer_opening, vocab_size, new_tracker };
        Ok(Some(ActiveThinkingBudget { budget, param }))
    }
}

/// Tokenises a text without adding special tokens; errors name `param`.
fn encode(
    serving: &ServingContext,
    text: &str,
    param: &'static str,
) -> Result<Vec<Token>, ApiError> {
    let ids = serving.tokenizer.encode(text, false);
    ids.map_err(|error| text_error(&error, param))
}

impl ActiveThinkingBudget {
    /// Rejects parameters that forbid a token of the end marker, because no other token is allowed where the
    /// marker is forced.
    ///
    /// Errors: HTTP status 400; the error names the parameter.
    pub(crate) fn check(
        &self,
        sampling: &SamplingParams,
        stop_ids: &[Token],
    ) -> Result<(), ApiError> {
        let ThinkingBudget { end_marker, answer_opening, .. } = &self.budget;
        // The opening of the answer begins with the end marker.
        let end_marker = answer_opening.as_ref().unwrap_or(end_marker);
        let forbids = |words: &[Vec<Token>]| {
            words.iter().any(|word| word.last().is_some_and(|last| end_marker.contains(last)))
        };
        let lacks_end_marker = |ids: &Vec<Token>| end_marker.iter().any(|id| !ids.contains(id));
        let stops = end_marker.iter().any(|id| stop_ids.contains(id));
        let param = if sampling.allowed_token_ids.as_ref().is_some_and(lacks_end_marker) {
            "allowed_token_ids"
        } else if forbids(&sampling.bad_words) {
            "bad_words"
        } else if sampling.min_tokens > 0 && stops {
            "min_tokens"
        } else {
            return Ok(());
        };
        let message = format!("forbids the tokens {end_marker:?} that {} forces", self.param);
        Err(ApiError::invalid(param, message))
    }
}

/// Rejects an end marker that would not end the reasoning.
fn check_end_marker(
    serving: &ServingContext,
    family: ReasoningFamily,
    end_marker: &[Token],
    param: &'static str,
) -> Result<(), ApiError> {
    let (tokenizer, end) = (&serving.tokenizer, family.markers().close);
    if !tokenizer.decode(end_marker, false).contains(end) {
        let message = format!("this model's tokenizer cannot encode {end}");
        return Err(ApiError::unsupported(param, message));
    }
    Ok(())
}
