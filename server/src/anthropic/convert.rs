//! Converts the messages of an Anthropic Messages request to chat template messages.

use super::content_blocks::{
    block_text, block_texts, system_text, too_many_blocks, unsupported_block,
};
use super::server_tools;
use crate::api_error::ApiError;
use crate::ignored_parts::IgnoredRequestParts;
use crate::openai::chat::messages::{self, PARTS_MAX};
use crate::openai::chat::system_turns::{place_system_turns, push_user};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};

/// Converts messages in order, and collects the resulting template messages.
#[derive(Default)]
pub(super) struct AnthropicMessageConverter {
    pub(super) messages: Vec<Value>,
    /// Reasoning effort set by the latest system message that contains one.
    pub(super) effort: Option<String>,
    /// Paths of request values that are accepted but have no effect on the reply.
    pub(super) hints: IgnoredRequestParts,
}

/// Conversation for a chat template, and the request settings found in its messages.
pub(super) struct ConvertedConversation {
    pub(super) messages: Vec<Value>,
    pub(super) effort: Option<String>,
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
    /// Creates a converter that adds the paths of values without effect to `hints`.
    pub(super) fn new(hints: &IgnoredRequestParts) -> Self {
        Self { hints: hints.clone(), ..Self::default() }
    }

    /// Adds the system prompt, which is a string or a list of text blocks.
    pub(super) fn system(&mut self, path: &str, value: JsonValue) -> Result<(), ApiError> {
        if let Some(text) = system_text(&self.hints, path, value)? {
            self.messages.push(json!({"role": "system", "content": text}));
        }
        Ok(())
    }

    /// Converts all messages and appends the resulting template messages.
    pub(super) fn messages(&mut self, list: Vec<JsonValue>) -> Result<(), ApiError> {
        let last_user = list.iter().rposition(is_user_message);
        for (index, value) in list.into_iter().enumerate() {
            let path = format!("messages[{index}]");
            let mut fields = RequestFields::nested_in(&self.hints, path, value)?;
            let role_path = fields.path("role");
            match fields.string("role", 64)?.as_deref() {
                Some("user") => self.message("user", &mut fields)?,
                Some("assistant") => self.message("assistant", &mut fields)?,
                Some("system") => {
                    self.system_turn(&mut fields, last_user.is_some_and(|last| last > index))?;
                }
                Some(_) => {
                    return Err(ApiError::invalid(role_path, "must be user, assistant or system"));
                }
                None => return Err(ApiError::invalid(role_path, "is missing")),
            }
        }
        Ok(())
    }

    /// Converts one user message or assistant message.
    fn message(&mut self, role: &str, fields: &mut RequestFields) -> Result<(), ApiError> {
        let path = fields.path("content");
        let (mut parts, before) = (GroupedContentBlocks::default(), self.messages.len());
        match fields.take("content") {
            None => return Err(ApiError::invalid(path, "is missing")),
            Some(JsonValue::Str(text)) => parts.texts.push(text),
            Some(JsonValue::List(blocks)) if blocks.len() <= PARTS_MAX => {
                for (index, block) in blocks.into_iter().enumerate() {
                    let block = fields.nested(format!("{path}[{index}]"), block)?;
                    self.block(role, block, &mut parts)?;
                }
            }
            Some(JsonValue::List(blocks)) => return Err(too_many_blocks(&path, blocks.len())),
            Some(other) => return Err(wrong_type(path, "a string or a list of blocks", &other)),
        }
        // A message that contains only tool results has no further content: each tool result has already
        // been appended as a separate chat template message.
        if !parts.is_empty() || self.messages.len() == before {
            self.push(role, parts);
        }
        Ok(())
    }

    /// Adds one content block of a message to `parts`. A tool result is instead appended as a separate chat
    /// template message.
    fn block(
        &mut self,
        role: &str,
        mut block: RequestFields,
        parts: &mut GroupedContentBlocks,
    ) -> Result<(), ApiError> {
        let path = block.path("type");
        let kind = block.string("type", 64)?;
        match (kind.as_deref(), role) {
            (Some("thinking"), "assistant") => {
                parts.reasoning.push(block.required_string("thinking")?);
                block.omit(&["signature"]);
            }
            (Some("redacted_thinking" | "fallback"), "assistant") => block.accept_whole(),
            (Some("tool_use"), "assistant") => parts.calls.push(tool_use(&mut block)?),
            (Some("server_tool_use" | "mcp_tool_use"), "assistant") => {
                parts.calls.push(server_tools::call(&mut block)?);
            }
            (Some(kind), _) if server_tools::is_result(kind) => {
                if !parts.is_empty() {
                    self.push(role, std::mem::take(parts));
                }
                self.messages.push(server_tools::result(&mut block)?);
            }
            (Some("tool_result"), "user") => {
                if !parts.is_empty() {
                    self.push(role, std::mem::take(parts));
                }
                self.messages.push(tool_result(&mut block)?);
            }
            (Some("container_upload"), "user") => {
                let message = "files of containers are not supported: send the text of the file";
                return Err(unsupported_block(&block, message));
            }
            (Some(kind @ "text"), _)
            | (Some(kind @ "compaction"), "assistant")
            | (Some(kind @ ("document" | "search_result")), "user") => {
                parts.texts.push(block_text(kind, &mut block)?);
            }
            (Some(kind), _) => {
                messages::reject_media(kind, block.own_path())?;
                let message = format!("content blocks of type {kind:?} are not supported here");
                return Err(unsupported_block(&block, &message));
            }
            (None, _) => return Err(ApiError::invalid(path, "is missing")),
        }
        Ok(())
    }

    /// Appends one template message that contains `parts`.
    fn push(&mut self, role: &str, parts: GroupedContentBlocks) {
        let GroupedContentBlocks { texts, reasoning, calls } = parts;
        if role == "user" {
            return push_user(&texts.join("\n"), &mut self.messages);
        }
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

    /// Returns the conversation. `is_shown_inline` returns whether the chat template shows system messages
    /// within a conversation.
    pub(super) fn finish(self, is_shown_inline: impl FnOnce() -> bool) -> ConvertedConversation {
        let Self { messages, effort, .. } = self;
        let messages = place_system_turns(messages, is_shown_inline);
        ConvertedConversation { messages, effort }
    }
}

impl ConvertedConversation {
    /// Whether the output can continue the last message: it is an assistant message without tool calls.
    pub(super) fn can_be_continued(&self) -> bool {
        let last = self.messages.last();
        last.is_some_and(|last| last["role"] == "assistant" && last["tool_calls"].is_null())
    }
}

fn is_user_message(message: &JsonValue) -> bool {
    string_member(message, "role") == Some("user")
}

/// Returns the member `name` of an object if it is a string.
pub(super) fn string_member<'a>(value: &'a JsonValue, name: &str) -> Option<&'a str> {
    let JsonValue::Object(pairs) = value else { return None };
    match pairs.iter().find(|(key, _)| key == name) {
        Some((_, JsonValue::Str(text))) => Some(text),
        _ => None,
    }
}

/// Converts a tool result to a template message. Chat templates have no place for the field `is_error`, so the
/// value true is reported as having no effect.
fn tool_result(block: &mut RequestFields) -> Result<Value, ApiError> {
    let id = block.required_string("tool_use_id")?;
    let content = match block.take("content") {
        None => String::new(),
        Some(content) => block_texts(block.hints(), &block.path("content"), content)?.join("\n"),
    };
    if block.bool("is_error")? == Some(true) {
        block.accept_without_effect(block.path("is_error"));
    }
    Ok(json!({"role": "tool", "tool_call_id": id, "content": content}))
}

fn tool_use(block: &mut RequestFields) -> Result<Value, ApiError> {
    let (id, name) = (block.required_string("id")?, block.required_string("name")?);
    let input = messages::arguments(&block.path("input"), block.take("input"))?;
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(messages: &Value) -> Result<ConvertedConversation, ApiError> {
        converted_with(&IgnoredRequestParts::default(), messages)
    }

    fn converted_with(
        hints: &IgnoredRequestParts,
        messages: &Value,
    ) -> Result<ConvertedConversation, ApiError> {
        let mut converter = AnthropicMessageConverter::new(hints);
        converter.system("system", JsonValue::Str("S".to_owned()))?;
        match JsonValue::parse(messages.to_string().as_bytes())? {
            JsonValue::List(list) => converter.messages(list)?,
            other => panic!("{other:?}"),
        }
        Ok(converter.finish(|| true))
    }

    fn texts(conversation: &ConvertedConversation) -> String {
        let member = |message: &Value, name: &str| message[name].as_str().unwrap().to_owned();
        let text = |m: &Value| format!("{}:{} ", member(m, "role"), member(m, "content"));
        conversation.messages.iter().map(text).collect()
    }

    #[test]
    fn system_messages_are_shown_until_they_are_cleared() {
        let note = json!({"role": "system", "content": "N", "clear_at": "next_user_message"});
        let user = json!({"role": "user", "content": "a"});
        let shown = converted(&json!([user, note])).unwrap();
        assert_eq!(texts(&shown), "system:S user:a system:N ");
        let cleared = converted(&json!([user, note, user])).unwrap();
        assert_eq!(texts(&cleared), "system:S user:a\na ");
        let kept = json!({"role": "system", "content": "N", "clear_at": "never"});
        assert_eq!(
            texts(&converted(&json!([user, kept, user])).unwrap()),
            "system:S user:a system:N user:a "
        );
    }

    #[test]
    fn last_system_message_sets_the_effort() {
        let turn = |effort: &str| json!({"role": "system", "content": [], "output_config": {"effort": effort}});
        let user = json!({"role": "user", "content": "a"});
        let conversation = converted(&json!([turn("low"), user, turn("high")])).unwrap();
        assert_eq!(conversation.effort.as_deref(), Some("high"));
        assert_eq!(texts(&conversation), "system:S user:a ");
    }

    #[test]
    fn blocks_of_server_tools_become_calls_and_results() {
        let page = json!({"type": "web_search_result", "title": "T", "url": "u"});
        let content = json!([
            {"type": "text", "text": "I look."},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]},
            {"type": "text", "text": "Found."},
        ]);
        let user = json!({"role": "user", "content": "a"});
        let conversation =
            converted(&json!([user, {"role": "assistant", "content": content}])).unwrap();
        assert_eq!(
            texts(&conversation),
            "system:S user:a assistant:I look. tool:T\nu assistant:Found. "
        );
        let function = json!({"name": "web_search", "arguments": {"query": "q"}});
        let calls = json!([{"id": "s", "type": "function", "function": function}]);
        assert_eq!(conversation.messages[2]["tool_calls"], calls);
        assert!(conversation.can_be_continued());
    }

    #[test]
    fn additions_of_listed_tools_have_no_effect() {
        let hints = IgnoredRequestParts::default();
        let addition = |tool: Value| {
            let content =
                json!([{"type": "text", "text": "N"}, {"type": "tool_addition", "tool": tool}]);
            let messages =
                json!([{"role": "user", "content": "a"}, {"role": "system", "content": content}]);
            converted_with(&hints, &messages)
        };
        let listed = addition(json!({"type": "tool_reference", "name": "weather"})).unwrap();
        assert_eq!(hints.names(), ["messages[1].content[1]"]);
        assert_eq!(texts(&listed), "system:S user:a system:N ");
        let error = addition(json!({"type": "tool_definition", "definition": {}})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("messages[1].content[1]"));
    }

    #[test]
    fn unread_values_of_blocks_are_named_by_path() {
        let hints = IgnoredRequestParts::default();
        let cache = json!({"type": "ephemeral"});
        let text = json!({"type": "text", "text": "b", "citations": [], "cache_control": cache});
        let assistant = json!([
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}},
        ]);
        let inner = json!([{"type": "text", "text": "r", "cache_control": cache}]);
        let result = |is_error: bool| json!({"type": "tool_result", "tool_use_id": "c", "content": inner, "is_error": is_error});
        let messages = json!([
            {"role": "user", "content": [text]},
            {"role": "assistant", "content": assistant},
            {"role": "user", "content": [result(false), result(true)]},
        ]);
        converted_with(&hints, &messages).unwrap();
        let expected = [
            "messages[0].content[0].cache_control",
            "messages[0].content[0].citations",
            "messages[1].content[1]",
            "messages[1].content[2].caller",
            "messages[2].content[0].content[0].cache_control",
            "messages[2].content[1].content[0].cache_control",
            "messages[2].content[1].is_error",
        ];
        assert_eq!(hints.names(), expected);
    }

    #[test]
    fn invalid_messages_are_rejected_with_their_path() {
        for (message, param) in [
            (json!({"role": "developer", "content": "a"}), "messages[0].role"),
            (json!({"role": "system"}), "messages[0].content"),
            (json!({"role": "system", "content": [{"type": "image"}]}), "messages[0].content[0]"),
            (json!({"role": "system", "content": "a", "clear_at": "soon"}), "messages[0].clear_at"),
            (json!({"role": "user", "content": [{"type": "image"}]}), "messages[0].content[0]"),
            (
                json!({"role": "assistant", "content": [{"type": "image"}]}),
                "messages[0].content[0]",
            ),
            (json!({"role": "user", "content": [{}]}), "messages[0].content[0].type"),
            (
                json!({"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}),
                "messages[0].content[0]",
            ),
        ] {
            let error = converted(&json!([message])).err().unwrap();
            assert_eq!(error.param.as_deref(), Some(param), "{message}");
        }
    }
}
