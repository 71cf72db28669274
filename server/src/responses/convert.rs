//! Converts the input items of a Responses request to messages of a chat template.

use crate::api_error::ApiError;
use crate::openai::chat::messages::{self, MESSAGES_MAX, TEXT_PARTS, text_of};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Value, json};

/// Converts input items and appends them to a conversation.
pub(super) struct InputItemConverter<'a> {
    messages: &'a mut Vec<Value>,
    /// Reasoning items that will be part of the next assistant message or tool call.
    pending_reasoning: String,
}

impl<'a> InputItemConverter<'a> {
    /// Creates a converter that appends to `messages`, the earlier conversation.
    pub(super) fn new(messages: &'a mut Vec<Value>) -> Self {
        Self { messages, pending_reasoning: String::new() }
    }

    /// Converts the field `input`: a user message as text, or a list of items.
    pub(super) fn input(&mut self, input: Option<JsonValue>) -> Result<(), ApiError> {
        match input {
            None => Err(ApiError::invalid("input", "is missing")),
            Some(JsonValue::Str(text)) => {
                self.messages.push(json!({"role": "user", "content": text}));
                Ok(())
            }
            Some(JsonValue::List(list)) if (1..=MESSAGES_MAX).contains(&list.len()) => {
                let mut items = list.into_iter().enumerate();
                items.try_for_each(|(i, item)| {
                    self.item(RequestFields::of(format!("input[{i}]"), item)?)
                })
            }
            Some(JsonValue::List(list)) => {
                let message = format!("must have 1 to {MESSAGES_MAX} items, got {}", list.len());
                Err(ApiError::invalid("input", message))
            }
            Some(other) => {
                Err(wrong_type("input".to_owned(), "a string or a list of items", &other))
            }
        }
    }

    fn item(&mut self, mut item: RequestFields) -> Result<(), ApiError> {
        let path = item.path("type");
        match item.string("type", 64)?.as_deref() {
            None | Some("message") => self.message(&mut item),
            Some("function_call") => self.call(&mut item),
            Some("function_call_output") => {
                let (id, output) = (item.required_string("call_id")?, item.required("output")?);
                let content = text_of(&item.path("output"), output, TEXT_PARTS)?;
                self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
                Ok(())
            }
            Some("reasoning") => self.reasoning(&mut item),
            Some(_) => {
                let message = "items of this type are not supported";
                Err(ApiError::bad_request("unsupported_content", path, message))
            }
        }
    }

    fn message(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        let path = item.path("role");
        let role = match item.string("role", 64)?.as_deref() {
            Some("user") => "user",
            Some("assistant") => "assistant",
            // Chat templates use the older role name `system` for `developer`.
            Some("system" | "developer") => "system",
            Some(_) => {
                let message = "must be user, assistant, system or developer";
                return Err(ApiError::invalid(path, message));
            }
            None => return Err(ApiError::invalid(path, "is missing")),
        };
        let content = messages::content(item, role)?;
        let mut message = json!({"role": role, "content": content});
        self.add_reasoning(&mut message);
        self.messages.push(message);
        Ok(())
    }

    /// Adds a tool call to the preceding assistant message, or to a new one.
    fn call(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        let (id, name) = (item.required_string("call_id")?, item.required_string("name")?);
        let path = item.path("arguments");
        let arguments = messages::arguments(&path, item.take("arguments"))?;
        let call = json!({"id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}});
        if self.messages.last().is_none_or(|last| last["role"] != "assistant") {
            let mut message = json!({"role": "assistant", "content": ""});
            self.add_reasoning(&mut message);
            self.messages.push(message);
        }
        let Some(last) = self.messages.last_mut() else { return Ok(()) };
        match last["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
        Ok(())
    }

    fn reasoning(&mut self, item: &mut RequestFields) -> Result<(), ApiError> {
        if let Some(JsonValue::List(parts)) = item.take("content") {
            for (index, part) in parts.into_iter().enumerate() {
                let mut part = RequestFields::of(item.path(&format!("content[{index}]")), part)?;
                self.pending_reasoning += &part.required_string("text")?;
            }
        }
        Ok(())
    }

    fn add_reasoning(&mut self, message: &mut Value) {
        if message["role"] == "assistant" && !self.pending_reasoning.is_empty() {
            message["reasoning_content"] = Value::from(std::mem::take(&mut self.pending_reasoning));
        }
    }
}

/// Returns the messages of a conversation. `instructions` and the system messages at the start are joined to
/// one message, because chat templates accept only one system message, which must come first.
pub(super) fn conversation(instructions: Option<&str>, history: &[Value]) -> Value {
    let is_system = |message: &&Value| message["role"] == "system";
    let leading = history.iter().take_while(is_system).count();
    let texts = history[..leading].iter().filter_map(|message| message["content"].as_str());
    let system: Vec<&str> = instructions.into_iter().chain(texts).collect();
    let first = json!({"role": "system", "content": system.join("\n\n")});
    let first = (!system.is_empty()).then_some(first);
    first.into_iter().chain(history[leading..].iter().cloned()).collect()
}
