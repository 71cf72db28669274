//! Converts the messages of an Anthropic Messages request to messages of a chat template.

use crate::api_error::ApiError;
use crate::openai::chat::messages::{PARTS_MAX, text_of};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};

/// Types of the content blocks that contain plain text.
const TEXT_BLOCKS: &[&str] = &["text"];

/// Converts messages one after the other, and collects the resulting template messages.
#[derive(Default)]
pub(super) struct AnthropicMessageConverter {
    messages: Vec<Value>,
}

/// Content blocks of one message, grouped by kind.
#[derive(Default)]
struct GroupedContentBlocks {
    texts: Vec<String>,
    reasoning: Vec<String>,
    calls: Vec<Value>,
}

impl GroupedContentBlocks {
    fn is_empty(&self) -> bool {
        self.texts.is_empty() && self.reasoning.is_empty() && self.calls.is_empty()
    }
}

impl AnthropicMessageConverter {
    /// Adds the system prompt, which is a string or a list of text blocks.
    pub(super) fn system(&mut self, path: &str, value: JsonValue) -> Result<(), ApiError> {
        let text = text_of(path, value, TEXT_BLOCKS)?;
        self.messages.push(json!({"role": "system", "content": text}));
        Ok(())
    }

    /// Converts one message and appends the resulting template messages.
    pub(super) fn message(&mut self, path: String, value: JsonValue) -> Result<(), ApiError> {
        let mut fields = RequestFields::of(path, value)?;
        let role_path = fields.path("role");
        let role = match fields.string("role", 64)?.as_deref() {
            Some("user") => "user",
            Some("assistant") => "assistant",
            Some(_) => return Err(ApiError::invalid(role_path, "must be user or assistant")),
            None => return Err(ApiError::invalid(role_path, "is missing")),
        };
        let path = fields.path("content");
        let (mut parts, before) = (GroupedContentBlocks::default(), self.messages.len());
        match fields.take("content") {
            None => return Err(ApiError::invalid(path, "is missing")),
            Some(JsonValue::Str(text)) => parts.texts.push(text),
            Some(JsonValue::List(blocks)) if blocks.len() <= PARTS_MAX => {
                for (index, block) in blocks.into_iter().enumerate() {
                    self.block(
                        role,
                        RequestFields::of(format!("{path}[{index}]"), block)?,
                        &mut parts,
                    )?;
                }
            }
            Some(JsonValue::List(blocks)) => {
                let message = format!("at most {PARTS_MAX} blocks, got {}", blocks.len());
                return Err(ApiError::invalid(path, message));
            }
            Some(other) => return Err(wrong_type(path, "a string or a list of blocks", &other)),
        }
        // A message that consists of tool results only has already been converted to one template message per
        // result.
        if !parts.is_empty() || self.messages.len() == before {
            self.push(role, parts);
        }
        Ok(())
    }

    /// Adds one content block of a message to `parts`; a tool result becomes a template message of its own.
    fn block(
        &mut self,
        role: &str,
        mut block: RequestFields,
        parts: &mut GroupedContentBlocks,
    ) -> Result<(), ApiError> {
        let path = block.path("type");
        let kind = block.string("type", 64)?;
        match (kind.as_deref(), role) {
            (Some("text"), _) => parts.texts.push(block.required_string("text")?),
            (Some("thinking"), "assistant") => {
                parts.reasoning.push(block.required_string("thinking")?);
            }
            (Some("redacted_thinking"), "assistant") => {}
            (Some("tool_use"), "assistant") => parts.calls.push(tool_use(&mut block)?),
            (Some("tool_result"), "user") => {
                if !parts.is_empty() {
                    self.push(role, std::mem::take(parts));
                }
                self.messages.push(tool_result(&mut block)?);
            }
            (Some(_), _) => {
                let message = "content blocks of this type are not supported";
                return Err(ApiError::bad_request("unsupported_content", path, message));
            }
            (None, _) => return Err(ApiError::invalid(path, "is missing")),
        }
        Ok(())
    }

    /// Appends one template message that contains `parts`.
    fn push(&mut self, role: &str, parts: GroupedContentBlocks) {
        let GroupedContentBlocks { texts, reasoning, calls } = parts;
        let mut message = Map::new();
        message.insert("role".to_owned(), Value::from(role));
        message.insert("content".to_owned(), Value::from(texts.join("\n")));
        if !reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), Value::from(reasoning.join("\n")));
        }
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        self.messages.push(Value::Object(message));
    }

    /// Whether the output can continue the last message: it is an assistant message without tool calls.
    pub(super) fn can_be_continued(&self) -> bool {
        let last = self.messages.last();
        last.is_some_and(|last| last["role"] == "assistant" && last["tool_calls"].is_null())
    }

    pub(super) fn into_messages(self) -> Value {
        Value::Array(self.messages)
    }
}

/// Converts a tool result to a template message.
fn tool_result(block: &mut RequestFields) -> Result<Value, ApiError> {
    let id = block.required_string("tool_use_id")?;
    let content = match block.take("content") {
        None => String::new(),
        Some(content) => text_of(&block.path("content"), content, TEXT_BLOCKS)?,
    };
    Ok(json!({"role": "tool", "tool_call_id": id, "content": content}))
}

fn tool_use(block: &mut RequestFields) -> Result<Value, ApiError> {
    let (id, name) = (block.required_string("id")?, block.required_string("name")?);
    let path = block.path("input");
    let input = match block.take("input") {
        None => json!({}),
        Some(JsonValue::Object(pairs)) => JsonValue::Object(pairs).into_value(),
        Some(other) => return Err(wrong_type(path, "an object", &other)),
    };
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
}
