//! Parses and validates the fields of a text completion request.

use crate::api_error::ApiError;
use crate::openai::params::{CompletionParams, FieldBounds, SamplingDefaults, count_of_logprobs};
use crate::request_fields::{RequestFields, int_list, wrong_type};
use crate::strict_json::JsonValue;
use protocol::Token;

const PROMPTS_MAX: usize = 256;

/// One prompt of a text completion request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CompletionPrompt {
    /// Text prompt.
    Text(String),
    /// Token ids, all of them below the vocabulary size.
    Ids(Vec<Token>),
}

/// Validated text completion request.
#[derive(Debug, Clone)]
pub(super) struct CompletionRequest {
    pub(super) params: CompletionParams,
    pub(super) prompts: Vec<CompletionPrompt>,
    pub(super) logprobs: Option<u32>,
    pub(super) add_special_tokens: bool,
}

impl CompletionRequest {
    /// Parses all fields of a text completion request.
    ///
    /// Errors: HTTP status 400; the error names the invalid field.
    pub(super) fn take(
        fields: &mut RequestFields,
        bounds: &FieldBounds,
        defaults: &SamplingDefaults,
    ) -> Result<Self, ApiError> {
        let mut params = CompletionParams::take(fields, bounds, defaults)?;
        if fields.take("thinking_token_budget").is_some() {
            let message = "reasoning is parsed for chat only";
            return Err(ApiError::unsupported("thinking_token_budget", message));
        }
        let prompts = take_prompts(fields, "prompt", PROMPTS_MAX, bounds)?;
        let logprobs = count_of_logprobs(fields, "logprobs", bounds)?;
        let low = i64::from(!params.echo);
        params.take_max_tokens(fields, low)?;
        let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(true);
        Ok(Self { params, prompts, logprobs, add_special_tokens })
    }
}

/// Parses the field `name`: a string, a list of strings, a list of token ids, or a list of such lists. A list
/// has at most `prompts_max` prompts.
pub(crate) fn take_prompts(
    fields: &mut RequestFields,
    name: &str,
    prompts_max: usize,
    bounds: &FieldBounds,
) -> Result<Vec<CompletionPrompt>, ApiError> {
    let ids = |path: &str, value: JsonValue| {
        let list = int_list(path, value, 0..=i64::from(bounds.vocab_size) - 1, usize::MAX)?;
        if list.is_empty() {
            return Err(ApiError::invalid(path, "the prompt is empty"));
        }
        Ok(CompletionPrompt::Ids(list.into_iter().map(|id| id as Token).collect()))
    };
    match fields.take(name) {
        None => Err(ApiError::invalid(name, "is missing")),
        Some(JsonValue::Str(text)) if text.is_empty() => {
            Err(ApiError::invalid(name, "the prompt is empty"))
        }
        Some(JsonValue::Str(text)) => Ok(vec![CompletionPrompt::Text(text)]),
        Some(list @ JsonValue::Ints(_)) => Ok(vec![ids(name, list)?]),
        Some(JsonValue::List(list)) if list.first().is_some_and(JsonValue::is_number) => {
            Ok(vec![ids(name, JsonValue::List(list))?])
        }
        Some(JsonValue::List(list)) => {
            if list.is_empty() || list.len() > prompts_max {
                let message = format!("must have 1 to {prompts_max} prompts, got {}", list.len());
                return Err(ApiError::invalid(name, message));
            }
            let one_prompt = |(index, value)| {
                let path = format!("{name}[{index}]");
                match value {
                    JsonValue::Str(text) if text.is_empty() => {
                        Err(ApiError::invalid(path, "the prompt is empty"))
                    }
                    JsonValue::Str(text) => Ok(CompletionPrompt::Text(text)),
                    list @ (JsonValue::Ints(_) | JsonValue::List(_)) => ids(&path, list),
                    other => Err(wrong_type(path, "a string or a list of ids", &other)),
                }
            };
            let prompts: Vec<CompletionPrompt> =
                list.into_iter().enumerate().map(one_prompt).collect::<Result<_, _>>()?;
            let texts = prompts.iter().filter(|p| matches!(p, CompletionPrompt::Text(_))).count();
            if texts != 0 && texts != prompts.len() {
                let message = "must be all strings or all lists of ids";
                return Err(ApiError::invalid(name, message));
            }
            Ok(prompts)
        }
        Some(other) => Err(wrong_type(name.to_owned(), "a string or a list", &other)),
    }
}
