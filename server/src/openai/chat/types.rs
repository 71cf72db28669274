//! Parses and validates the fields of a chat completion request.

use super::messages;
use super::tools::RequestTools;
use crate::api_error::ApiError;
use crate::openai::params::{CompletionParams, FieldBounds, SamplingDefaults, count_of_logprobs};
use crate::openai::thinking_budget;
use crate::request_fields::RequestFields;
use text::ChatInput;

/// Validated chat completion request.
pub(crate) struct ChatCompletionRequest {
    /// Parameters shared by all completions.
    pub params: CompletionParams,
    /// Inputs of the chat template, without tools.
    pub input: ChatInput,
    /// Tools and tool choice.
    pub tools: RequestTools,
    /// Log-probabilities: `None` = none, else the number of top-k tokens in addition to the sampled token.
    pub logprobs: Option<u32>,
    /// Maximum number of reasoning tokens.
    pub thinking: Option<thinking_budget::RequestedThinkingBudget>,
    /// Whether the tokenizer adds special tokens such as BOS, if the model has them.
    pub add_special_tokens: bool,
    /// Name of the field with the conversation, for errors.
    pub prompt_field: &'static str,
}

impl ChatCompletionRequest {
    /// Takes all fields.
    ///
    /// Errors: 400 naming the field.
    pub(super) fn take(
        fields: &mut RequestFields,
        bounds: &FieldBounds,
        defaults: &SamplingDefaults,
    ) -> Result<Self, ApiError> {
        let tools = RequestTools::take(fields)?;
        let mut params = CompletionParams::take(fields, bounds, defaults)?;
        let logprobs = fields.bool("logprobs")?.unwrap_or(false);
        let top = count_of_logprobs(fields, "top_logprobs", bounds)?;
        if top.is_some_and(|top| top != 0) && !logprobs {
            let message = "top_logprobs needs logprobs: true";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        params.take_max_tokens(fields, 1)?;
        let thinking = thinking_budget::RequestedThinkingBudget::take(fields)?;
        let input = messages::take(fields)?;
        let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(false);
        let logprobs = logprobs.then_some(top.unwrap_or(0));
        let prompt_field = "messages";
        Ok(Self { params, input, tools, logprobs, thinking, add_special_tokens, prompt_field })
    }
}
