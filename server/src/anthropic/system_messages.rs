//! Converts system messages in the middle of a conversation.

use super::content_blocks::{system_block_text, system_text, too_many_blocks, unsupported_block};
use super::convert::{AnthropicMessageConverter, string_member};
use crate::api_error::ApiError;
use crate::openai::chat::messages::{self, PARTS_MAX};
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use serde_json::json;

impl AnthropicMessageConverter {
    /// Converts a system message in the middle of a conversation. `is_followed`: whether the next message
    /// is a user message.
    pub(super) fn system_turn(
        &mut self,
        fields: &mut RequestFields,
        is_followed: bool,
    ) -> Result<(), ApiError> {
        let path = fields.path("clear_at");
        let is_cleared = match fields.string("clear_at", 64)?.as_deref() {
            None | Some("never") => false,
            Some("next_user_message") => is_followed,
            Some(_) => return Err(ApiError::invalid(path, "must be never or next_user_message")),
        };
        let config = fields.take("output_config");
        let (path, has_config) = (fields.path("output_config"), config.is_some());
        if let Some(config) = config {
            let mut config = fields.nested(path, config)?;
            self.effort = messages::effort(&mut config, "effort")?.or(self.effort.take());
        }
        let path = fields.path("content");
        let text = match fields.take("content") {
            None if has_config => None,
            None => return Err(ApiError::invalid(path, "is missing")),
            Some(JsonValue::List(blocks)) => self.system_blocks(&path, blocks)?,
            Some(content) => system_text(&self.hints, &path, content)?,
        };
        if let Some(text) = text.filter(|text| !text.is_empty() && !is_cleared) {
            self.messages.push(json!({"role": "system", "content": text}));
        }
        Ok(())
    }

    /// Parses the blocks of a system message; `None` if no block contains text.
    fn system_blocks(
        &mut self,
        path: &str,
        blocks: Vec<JsonValue>,
    ) -> Result<Option<String>, ApiError> {
        if blocks.len() > PARTS_MAX {
            return Err(too_many_blocks(path, blocks.len()));
        }
        let mut texts = Vec::with_capacity(blocks.len());
        for (index, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}[{index}]");
            if string_member(&block, "type") == Some("tool_addition") {
                tool_addition(RequestFields::nested_in(&self.hints, path, block)?)?;
            } else {
                texts.extend(system_block_text(&self.hints, path, block)?);
            }
        }
        Ok((!texts.is_empty()).then(|| texts.join("\n")))
    }
}

/// Accepts a `tool_addition` block that references a tool in `tools`. The block has no effect, because all tools
/// in `tools` are available from the first message.
fn tool_addition(mut block: RequestFields) -> Result<(), ApiError> {
    let tool = block.required("tool")?;
    if string_member(&tool, "type") != Some("tool_reference") {
        return Err(unsupported_block(&block, "tools can be defined in tools only"));
    }
    block.accept_whole();
    Ok(())
}
