//! Parses and validates the fields of `/tokenize` and `/detokenize` requests.

use crate::api_error::ApiError;
use crate::openai::chat::messages;
use crate::openai::chat::tools::RequestTools;
use crate::request_fields::{RequestFields, int_list};
use protocol::Token;
use text::ChatInput;

/// Input of a `/tokenize` request.
pub(super) enum TokenizeInput {
    /// Plain text.
    Text(String),
    /// Conversation to be rendered with the chat template.
    Chat(Box<ChatInput>),
}

/// Validated `/tokenize` request.
pub(super) struct TokenizeRequest {
    pub(super) model: Option<String>,
    pub(super) input: TokenizeInput,
    pub(super) add_special_tokens: Option<bool>,
    pub(super) token_strs: bool,
}

impl TokenizeRequest {
    /// Parses all fields of a `/tokenize` request.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        let model = fields.string("model", 512)?;
        let add_special_tokens = fields.bool("add_special_tokens")?;
        let token_strs = fields.bool("return_token_strs")?.unwrap_or(false);
        let input = if let Some(text) = fields.string("prompt", usize::MAX)? {
            TokenizeInput::Text(text)
        } else {
            let tools = RequestTools::take(fields)?.template_value;
            TokenizeInput::Chat(Box::new(ChatInput { tools, ..messages::take(fields)? }))
        };
        Ok(Self { model, input, add_special_tokens, token_strs })
    }
}

/// Validated `/detokenize` request.
pub(super) struct DetokenizeRequest {
    pub(super) model: Option<String>,
    pub(super) tokens: Vec<Token>,
}

impl DetokenizeRequest {
    /// Parses all fields of a `/detokenize` request.
    pub(super) fn take(fields: &mut RequestFields, vocab_size: u32) -> Result<Self, ApiError> {
        let model = fields.string("model", 512)?;
        let Some(list) = fields.take("tokens") else {
            return Err(ApiError::invalid("tokens", "is missing"));
        };
        let list = int_list("tokens", list, 0..=i64::from(vocab_size) - 1, usize::MAX)?;
        Ok(Self { model, tokens: list.into_iter().map(|id| id as Token).collect() })
    }
}
