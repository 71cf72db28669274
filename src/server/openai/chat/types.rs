//! Fields of a chat completion request: forms and ranges.

use super::messages;
use super::tools::Tools;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::params::{Bounds, Defaults, Params, count_of_logprobs};
use crate::server::openai::thinking;
use crate::text::ChatInput;

/// A checked request.
pub struct ChatRequest {
    /// What all completions share.
    pub params: Params,
    /// What the template reads, but for tools.
    pub input: ChatInput,
    /// What may be called.
    pub tools: Tools,
    /// Log-probabilities: `None` = none, else how many besides the sampled token.
    pub logprobs: Option<u32>,
    /// Tokens of reasoning at most.
    pub thinking: Option<thinking::Asked>,
    /// A first token before the prompt, if the model has one.
    pub add_special_tokens: bool,
    /// Name of the field that holds the conversation.
    pub prompt_field: &'static str,
}

impl ChatRequest {
    /// Takes all fields.
    ///
    /// Errors: 400 naming the field.
    pub(super) fn take(
        fields: &mut Fields,
        bounds: &Bounds,
        defaults: &Defaults,
    ) -> Result<Self, ApiError> {
        let tools = Tools::take(fields)?;
        let mut params = Params::take(fields, bounds, defaults)?;
        let logprobs = fields.bool("logprobs")?.unwrap_or(false);
        let top = count_of_logprobs(fields, "top_logprobs", bounds)?;
        if top.is_some_and(|top| top != 0) && !logprobs {
            let message = "top_logprobs needs logprobs: true";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        params.take_max_tokens(fields, 1)?;
        let thinking = thinking::Asked::take(fields)?;
        let input = messages::take(fields)?;
        let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(false);
        let logprobs = logprobs.then_some(top.unwrap_or(0));
        let prompt_field = "messages";
        Ok(Self { params, input, tools, logprobs, thinking, add_special_tokens, prompt_field })
    }
}
