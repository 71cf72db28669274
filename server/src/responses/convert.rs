//! Converts the input items of a Responses request to chat template messages.

use super::hosted_tool_items::{HostedToolCall, HostedToolItem};
use super::items::{template_arguments, template_call};
use super::stored_context::{StoredContextReader, StoredConversationItems};
use crate::api_error::ApiError;
use crate::conversations::user_message;
use crate::ignored_parts::IgnoredRequestParts;
use crate::openai::chat::custom_tools::INPUT;
use crate::openai::chat::messages::{MESSAGES_MAX, TEXT_PARTS, reject_media, text_of};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Value, json};

/// Fields of items in earlier replies that identify or describe the item.
const REPLY_FIELDS: &[&str] = &["created_by", "id", "status"];

/// Converts input items and appends them to a conversation.
pub(super) struct InputItemConverter<'a, 'b> {
    messages: &'a mut Vec<Value>,
    /// Stored items to which input items may refer.
    stored: &'a mut StoredContextReader<'b>,
    /// Collects the paths of items and fields that contain nothing for the model.
    hints: IgnoredRequestParts,
    /// Text of reasoning items that will become part of the next assistant message or tool call.
    pending_reasoning: String,
    /// Input items to be appended to a stored conversation, with references resolved; `None` = not recorded.
    recorded: Option<Vec<Value>>,
}

impl<'a, 'b> InputItemConverter<'a, 'b> {
    /// Creates a converter that appends to `messages`, the earlier part of the conversation.
    pub(super) fn new(
        messages: &'a mut Vec<Value>,
        stored: &'a mut StoredContextReader<'b>,
        hints: &IgnoredRequestParts,
    ) -> Self {
        let hints = hints.clone();
        Self { messages, stored, hints, pending_reasoning: String::new(), recorded: None }
    }

    /// Starts recording the input items, which `into_recorded` returns.
    pub(super) fn record(&mut self) {
        self.recorded = Some(Vec::new());
    }

    /// Returns the input items recorded since `record` was called; empty if it was not called.
    pub(super) fn into_recorded(self) -> Vec<Value> {
        self.recorded.unwrap_or_default()
    }

    /// Converts the items of the stored conversation `id`. Returns the size of the conversation in bytes.
    pub(super) fn conversation(&mut self, id: &str) -> Result<usize, ApiError> {
        const FIELD: &str = "conversation";
        let StoredConversationItems { items, bytes } = self.stored.conversation(id, FIELD)?;
        for item in items {
            self.convert(RequestFields::of(FIELD.to_owned(), item)?)?;
        }
        Ok(bytes)
    }

    /// Converts the field `input`: a string, which is a user message, or a list of items.
    pub(super) fn input(&mut self, input: Option<JsonValue>) -> Result<(), ApiError> {
        match input {
            None => Err(ApiError::invalid("input", "is missing")),
            Some(JsonValue::Str(text)) => {
                if let Some(recorded) = &mut self.recorded {
                    recorded.push(user_message(&text));
                }
                self.messages.push(json!({"role": "user", "content": text}));
                Ok(())
            }
            Some(JsonValue::List(list)) if list.is_empty() => {
                Err(ApiError::invalid("input", "must have at least one item"))
            }
            Some(JsonValue::List(list)) => self.items("input", list),
            Some(other) => {
                Err(wrong_type("input".to_owned(), "a string or a list of items", &other))
            }
        }
    }

    /// Converts the list of items in the field `field`.
    pub(super) fn items(&mut self, field: &str, list: Vec<JsonValue>) -> Result<(), ApiError> {
        if list.len() > MESSAGES_MAX {
            let message = format!("at most {MESSAGES_MAX} items, got {}", list.len());
            return Err(ApiError::invalid(field, message));
        }
        for (index, item) in list.into_iter().enumerate() {
            let path = format!("{field}[{index}]");
            let item = self.resolved(&path, item)?;
            if let Some(recorded) = &mut self.recorded {
                recorded.push(item.clone().into_template_value());
            }
            self.convert(RequestFields::nested_in(&self.hints, path, item)?)?;
        }
        Ok(())
    }

    /// Resolves an item reference to the stored item; other items are returned unchanged.
    fn resolved(&mut self, path: &str, item: JsonValue) -> Result<JsonValue, ApiError> {
        if !is_reference(&item) {
            return Ok(item);
        }
        let mut reference = RequestFields::of(path.to_owned(), item)?;
        let id = reference.required_string("id")?;
        self.stored.item(&id, &reference.path("id"))
    }

    /// Converts one item that is not a reference.
    fn convert(&mut self, mut item: RequestFields) -> Result<(), ApiError> {
        let kind = item.string("type", 64)?.unwrap_or_else(|| "message".to_owned());
        self.convert_kind(&kind, &mut item)?;
        item.omit(REPLY_FIELDS);
        Ok(())
    }

    /// Converts one item of type `kind`.
    fn convert_kind(&mut self, kind: &str, item: &mut RequestFields) -> Result<(), ApiError> {
        match kind {
            "message" => self.message(item),
            "function_call" => self.function_call(item),
            "custom_tool_call" => self.custom_call(item),
            "function_call_output" | "custom_tool_call_output" => self.output(item),
            "reasoning" => self.reasoning(item),
            other => {
                reject_media(other, item.own_path())?;
                match HostedToolItem::take(other, item)? {
                    Some(foreign) => self.foreign(foreign),
                    None => item.accept_whole(),
                }
                Ok(())
            }
        }
    }

    fn message(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        let path = item.path("role");
        let role = match item.string("role", 64)?.as_deref() {
            Some("user") => "user",
            Some("assistant") => "assistant",
            Some("system") => "system",
            Some("developer") => "developer",
            Some(_) => {
                let message = "must be user, assistant, system or developer";
                return Err(ApiError::invalid(path, message));
            }
            None => return Err(ApiError::invalid(path, "is missing")),
        };
        let mut message = json!({"role": role, "content": message_text(item, role)?});
        self.add_reasoning(&mut message);
        self.messages.push(message);
        Ok(())
    }

    fn function_call(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        let (id, name) = (item.required_string("call_id")?, item.required_string("name")?);
        let namespace = item.string("namespace", usize::MAX)?;
        let path = item.path("arguments");
        let arguments = arguments(&path, item.take("arguments"))?;
        self.call(template_call(&id, namespace.as_deref(), &name, &arguments));
        Ok(())
    }

    fn custom_call(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        let (id, name) = (item.required_string("call_id")?, item.required_string("name")?);
        let namespace = item.string("namespace", usize::MAX)?;
        let arguments = json!({INPUT: item.required_string("input")?});
        self.call(template_call(&id, namespace.as_deref(), &name, &arguments));
        Ok(())
    }

    fn output(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        let (id, output) = (item.required_string("call_id")?, item.required("output")?);
        let content = text_of(item.hints(), &item.path("output"), output, TEXT_PARTS)?;
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        Ok(())
    }

    fn foreign(&mut self, item: HostedToolItem) {
        let HostedToolItem { call_id, call, output } = item;
        if let Some(HostedToolCall { name, arguments }) = call {
            self.call(template_call(&call_id, None, &name, &arguments));
        }
        if let Some(output) = output {
            let message = json!({"role": "tool", "tool_call_id": call_id, "content": output});
            self.messages.push(message);
        }
    }

    /// Adds a tool call to the preceding assistant message, or to a new one.
    fn call(&mut self, call: Value) {
        let continues = self.messages.last().is_some_and(|last| {
            let takes_reasoning =
                self.pending_reasoning.is_empty() || last.get("reasoning_content").is_none();
            last["role"] == "assistant" && takes_reasoning
        });
        if !continues {
            self.messages.push(json!({"role": "assistant", "content": ""}));
        }
        let reasoning = std::mem::take(&mut self.pending_reasoning);
        let Some(last) = self.messages.last_mut() else { return };
        if !reasoning.is_empty() {
            last["reasoning_content"] = Value::from(reasoning);
        }
        match last["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
    }

    /// Parses the reasoning text of an item: its content, or its summary if the content is empty.
    fn reasoning(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        let mut text = String::new();
        for name in ["content", "summary"] {
            let path = item.path(name);
            let Some(JsonValue::List(parts)) = item.take(name) else { continue };
            if !text.is_empty() {
                break;
            }
            for (index, part) in parts.into_iter().enumerate() {
                let mut part = item.nested(format!("{path}[{index}]"), part)?;
                text += &part.required_string("text")?;
                part.omit(&["type"]);
            }
        }
        self.pending_reasoning += &text;
        Ok(())
    }

    fn add_reasoning(&mut self, message: &mut Value) {
        if message["role"] == "assistant" && !self.pending_reasoning.is_empty() {
            message["reasoning_content"] = Value::from(std::mem::take(&mut self.pending_reasoning));
        }
    }
}

/// Whether an item is a reference to a stored item. The type of a reference may be omitted.
fn is_reference(item: &JsonValue) -> bool {
    let JsonValue::Object(pairs) = item else { return false };
    let value_of = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    match value_of("type") {
        Some(JsonValue::Str(kind)) => kind == "item_reference",
        Some(JsonValue::Null) | None => {
            value_of("role").is_none() && matches!(value_of("id"), Some(JsonValue::Str(_)))
        }
        Some(_) => false,
    }
}

/// Parses the arguments of an earlier call. The text is incomplete JSON if the call was truncated.
fn arguments(path: &str, value: Option<JsonValue>) -> Result<Value, ApiError> {
    match value {
        None => Ok(json!({})),
        Some(JsonValue::Str(text)) => Ok(template_arguments(&text)),
        Some(object @ JsonValue::Object(_)) => Ok(object.into_template_value()),
        Some(other) => Err(wrong_type(path.to_owned(), "the text of a JSON object", &other)),
    }
}

/// Parses the content of a message. The text of a refusal is the text of the message.
fn message_text(item: &mut RequestFields, role: &str) -> Result<String, ApiError> {
    let path = item.path("content");
    match item.take("content") {
        None if role == "assistant" => Ok(String::new()),
        None => Err(ApiError::invalid(path, "is missing")),
        Some(JsonValue::List(parts)) => {
            let parts = parts.into_iter().map(refusal_as_text).collect();
            text_of(item.hints(), &path, JsonValue::List(parts), TEXT_PARTS)
        }
        Some(value) => text_of(item.hints(), &path, value, TEXT_PARTS),
    }
}

/// Converts a refusal part to a text part.
fn refusal_as_text(part: JsonValue) -> JsonValue {
    let JsonValue::Object(pairs) = part else { return part };
    let value_of = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    match (value_of("type"), value_of("refusal")) {
        (Some(JsonValue::Str(kind)), Some(JsonValue::Str(refusal))) if kind == "refusal" => {
            let member =
                |name: &str, text: &str| (name.to_owned(), JsonValue::Str(text.to_owned()));
            JsonValue::Object(vec![member("type", "output_text"), member("text", refusal)])
        }
        _ => JsonValue::Object(pairs),
    }
}

/// Validates the items in the field `field` of a conversation; returns them as template values with
/// references resolved.
///
/// Errors: HTTP status 400 with the name of the invalid field; 404 for an item that is not stored.
pub(crate) fn input_items(
    items: JsonValue,
    field: &str,
    stored: &mut StoredContextReader<'_>,
) -> Result<Vec<Value>, ApiError> {
    let JsonValue::List(list) = items else {
        return Err(wrong_type(field.to_owned(), "a list of items", &items));
    };
    // Conversations store and return all fields of an item, so no field is without effect yet.
    let (mut messages, hints) = (Vec::new(), IgnoredRequestParts::default());
    let mut converter = InputItemConverter::new(&mut messages, stored, &hints);
    converter.record();
    converter.items(field, list)?;
    Ok(converter.into_recorded())
}
