//! Parses and validates the fields of a chat completion request.

use super::messages;
use super::tools::RequestTools;
use crate::api_error::ApiError;
use crate::openai::params::{CompletionParams, FieldBounds, SamplingDefaults, count_of_logprobs};
use crate::openai::thinking_budget;
use crate::request_fields::RequestFields;
use text::ChatInput;

/// Validated request, used by all chat endpoints.
pub(crate) struct ChatCompletionRequest {
    /// Parameters shared by chat completions and text completions.
    pub params: CompletionParams,
    /// Inputs of the chat template, except for the tools.
    pub input: ChatInput,
    /// Tool definitions and tool choice.
    pub tools: RequestTools,
    /// Number of most likely tokens whose log-probabilities are returned per output token, in addition to the
    /// sampled token's; `None` = no log-probabilities.
    pub logprobs: Option<u32>,
    /// Thinking budget: maximum number of reasoning tokens.
    pub thinking: Option<thinking_budget::RequestedThinkingBudget>,
    /// Whether the tokenizer adds special tokens such as BOS to the rendered prompt.
    pub add_special_tokens: bool,
    /// Name of the field that contains the conversation, for error messages.
    pub prompt_field: &'static str,
    /// Name of the field that contains the reasoning effort.
    pub effort_field: &'static str,
    /// Whether the constraint in `params` covers tool calls and the headers of messages, not only the text of
    /// the answer.
    pub covers_messages: bool,
}

/// Parses `logprobs` and `top_logprobs`. Returns the number of top-k tokens per token; `None` = the request has
/// no log-probabilities.
fn requested_logprobs(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
) -> Result<Option<u32>, ApiError> {
    let logprobs = fields.bool("logprobs")?.unwrap_or(false);
    let top = count_of_logprobs(fields, "top_logprobs", bounds)?;
    if top.is_some_and(|top| top != 0) && !logprobs {
        let message = "top_logprobs needs logprobs: true";
        return Err(ApiError::invalid("top_logprobs", message));
    }
    Ok(logprobs.then_some(top.unwrap_or(0)))
}

impl ChatCompletionRequest {
    /// Parses all fields of a chat completion request.
    ///
    /// Errors: HTTP status 400; the error names the invalid field.
    pub(crate) fn take(
        fields: &mut RequestFields,
        bounds: &FieldBounds,
        defaults: &SamplingDefaults,
    ) -> Result<Self, ApiError> {
        let tools = RequestTools::take(fields)?;
        let mut params = CompletionParams::take(fields, bounds, defaults)?;
        let logprobs = requested_logprobs(fields, bounds)?;
        params.take_max_tokens(fields, 1)?;
        let thinking = thinking_budget::RequestedThinkingBudget::take(fields)?;
        let input = messages::take(fields)?;
        let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(false);
        let prompt_field = "messages";
        Ok(Self {
            params,
            input,
            tools,
            logprobs,
            thinking,
            add_special_tokens,
            prompt_field,
            effort_field: "reasoning_effort",
            covers_messages: false,
        })
    }
}
