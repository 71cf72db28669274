//! Trial renderings: renders short conversations with a chat template and searches the output for the message
//! texts, to find the message forms that the template takes.

use super::super::error::TextError;
use super::engine::NamedTemplateSet;
use serde_json::{Map, Value, json};
use std::cell::Cell;

/// Text of the trial message, which a trial rendering searches for in the output. It occurs in no published
/// template.
const TEXT: &str = "qzxtext";
/// Text of the second content part of the trial message.
const SECOND_TEXT: &str = "qzxsecond";
/// Text of the messages that surround the trial message.
const OTHER_TEXT: &str = "qzxother";
/// Name of the tool that trial conversations define and call.
const TOOL: &str = "qzxtool";
/// Name and value of the only argument in the tool call of a trial conversation.
const KEY: &str = "qzxkey";
const VALUE: &str = "qzxvalue";
/// Id of the tool call in a trial conversation; templates of Mistral require nine alphanumeric characters.
const CALL_ID: &str = "qzxcall00";

/// Form of the content of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentForm {
    /// A string.
    Text,
    /// A list of content parts.
    Parts,
}

impl ContentForm {
    fn of(self, text: &str) -> Value {
        match self {
            Self::Text => json!(text),
            Self::Parts => json!([{"type": "text", "text": text}]),
        }
    }
}

/// Form of the arguments of a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ArgumentsForm {
    /// A JSON object, the form documented by transformers.
    #[default]
    Object,
    /// JSON text, as in OpenAI's API.
    Text,
}

impl ArgumentsForm {
    fn value(self) -> Value {
        match self {
            Self::Object => json!({KEY: VALUE}),
            Self::Text => json!(format!("{{\"{KEY}\": \"{VALUE}\"}}")),
        }
    }
}

/// Content of the assistant message that contains the tool call of a trial conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallMessageContent {
    /// The empty string.
    Empty,
    /// The message has no content.
    Absent,
}

/// Whether the output of a trial rendering contains the text of the trial message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrialOutcome {
    /// The template failed.
    Failed,
    /// The output lacks the text, or contains the text only because a list was printed as a Python value.
    Hidden,
    /// The output contains the text.
    Shown,
}

/// Trial outcomes for the two forms of message content: a string, and a list of parts.
#[derive(Debug, Clone, Copy)]
pub(super) struct ContentTrialOutcomes {
    /// Outcome with content that is a string.
    pub(super) text: TrialOutcome,
    /// Outcome with content that is a list of parts.
    pub(super) parts: TrialOutcome,
}

impl ContentTrialOutcomes {
    /// Determines the outcomes from the outputs for content that is a string and for content that is a list of
    /// parts.
    fn new(text: Option<&str>, parts: Option<&str>) -> Self {
        let outcome = |output: Option<&str>, shows: bool| match output {
            None => TrialOutcome::Failed,
            Some(_) if shows => TrialOutcome::Shown,
            Some(_) => TrialOutcome::Hidden,
        };
        // A template that prints strings as JSON is meant to print lists as JSON too, so a printed JSON list
        // counts as shown.
        let prints_json = text.is_some_and(|output| output.contains(&format!("\"{TEXT}\"")));
        let shows_parts = |output: &str| {
            output.contains(TEXT)
                && output.contains(SECOND_TEXT)
                && !output.contains("'type': 'text'")
                && (prints_json || !output.contains("\"type\": \"text\""))
        };
        Self {
            text: outcome(text, text.is_some_and(|output| output.contains(TEXT))),
            parts: outcome(parts, parts.is_some_and(shows_parts)),
        }
    }
}

/// Renders short trial conversations with one template, to determine the message forms that it takes.
pub(super) struct TrialRenderer<'a> {
    engine: &'a NamedTemplateSet,
    /// Template variables except for messages, tools and documents.
    variables: &'a Map<String, Value>,
    /// Whether the trial conversations define a tool.
    tools: bool,
    /// Whether a trial rendering exceeded a limit. No further trials are run then, because each of them may
    /// be expensive.
    exhausted: Cell<bool>,
}

impl<'a> TrialRenderer<'a> {
    pub(super) fn new(
        engine: &'a NamedTemplateSet,
        variables: &'a Map<String, Value>,
        tools: bool,
    ) -> Self {
        Self { engine, variables, tools, exhausted: Cell::new(false) }
    }

    /// Renders a conversation; `None` if the template fails.
    fn render(&self, messages: &[Value], tools: bool) -> Option<String> {
        if self.exhausted.get() {
            return None;
        }
        let skipped = ["messages", "tools", "documents", "add_generation_prompt"];
        let others = self.variables.iter().filter(|(name, _)| !skipped.contains(&name.as_str()));
        let mut variables: Map<String, Value> =
            others.map(|(name, value)| (name.clone(), value.clone())).collect();
        variables.insert("messages".to_owned(), Value::from(messages));
        let tools = if tools { json!([trial_tool()]) } else { Value::Null };
        variables.insert("tools".to_owned(), tools);
        variables.insert("documents".to_owned(), Value::Null);
        variables.insert("add_generation_prompt".to_owned(), Value::Bool(true));
        let rendered = self.engine.render(false, &variables);
        if let Err(TextError::TemplateFuelExhausted(_) | TextError::RenderedTooLong(_)) = rendered {
            self.exhausted.set(true);
        }
        rendered.ok()
    }

    /// Tests whether the template renders the content of messages of the role `role`. Each trial conversation has
    /// one message of this role at another position; the first conversation has it where chats usually have it.
    /// Each conversation is rendered twice, with the content of this message as a string and as a list of parts.
    /// `other` is the content form of the other messages, `arguments` the form of the arguments of tool calls.
    /// Returns the outcomes of each conversation.
    pub(super) fn message(
        &self,
        role: &str,
        other: ContentForm,
        arguments: ArgumentsForm,
    ) -> Vec<ContentTrialOutcomes> {
        let parts = json!([{"type": "text", "text": TEXT}, {"type": "text", "text": SECOND_TEXT}]);
        let conversations = |content: Value| {
            let messages = match role {
                "tool" => tool_conversations(&content, other, arguments),
                _ => conversations_around(role, json!({"role": role, "content": content}), other),
            };
            messages.into_iter().map(|messages| self.render(&messages, self.tools))
        };
        let pairs = conversations(json!(TEXT)).zip(conversations(parts));
        pairs
            .map(|(text, parts)| ContentTrialOutcomes::new(text.as_deref(), parts.as_deref()))
            .collect()
    }

    /// Renders conversations with a tool call whose arguments have the form `arguments`, and returns the
    /// outputs.
    pub(super) fn calls(
        &self,
        arguments: ArgumentsForm,
        content: CallMessageContent,
        other: ContentForm,
    ) -> Vec<String> {
        let user = json!({"role": "user", "content": other.of(OTHER_TEXT)});
        let call = call_message(arguments, content);
        let result = tool_message(&other.of(OTHER_TEXT));
        let conversations = [vec![user.clone(), call.clone(), result], vec![user, call]];
        conversations.iter().filter_map(|messages| self.render(messages, self.tools)).collect()
    }

    /// Whether the output contains the `metadata` of a message of the assistant, in the line before its content.
    pub(super) fn shows_metadata(&self, other: ContentForm) -> bool {
        let user = json!({"role": "user", "content": other.of(OTHER_TEXT)});
        let call = json!({"role": "assistant", "metadata": TOOL, "content": other.of(TEXT)});
        let output = self.render(&[user.clone(), call, user], self.tools);
        output.is_some_and(|output| output.contains(&format!("{TOOL}\n{TEXT}")))
    }

    /// Whether the output contains the tool definitions of a request, in a conversation with only a user
    /// message or with a system and a user message; `other` is the content form of these messages.
    pub(super) fn shows_tools(&self, other: ContentForm) -> bool {
        let user = json!({"role": "user", "content": other.of(OTHER_TEXT)});
        let system = json!({"role": "system", "content": other.of(OTHER_TEXT)});
        let conversations = [vec![user.clone()], vec![system, user]];
        let mut outputs = conversations.iter().filter_map(|m| self.render(m, true));
        outputs.any(|output| output.contains(TOOL))
    }
}

/// Whether `output`, returned by `TrialRenderer::calls`, contains the argument of the tool call.
pub(super) fn shows_call(output: &str) -> bool {
    output.contains(KEY) && output.contains(VALUE)
}

/// Whether the output contains the arguments of the trial tool call as JSON text.
pub(super) fn shows_call_text(output: &str) -> bool {
    output.contains(&format!("{{\"{KEY}\": \"{VALUE}\"}}"))
}

/// Whether the output contains the arguments of the trial tool call as Python prints a dict.
pub(super) fn shows_call_repr(output: &str) -> bool {
    output.contains(&format!("'{KEY}': '{VALUE}'"))
}

fn conversations_around(role: &str, message: Value, other: ContentForm) -> Vec<Vec<Value>> {
    let other_message = |role: &str| json!({"role": role, "content": other.of(OTHER_TEXT)});
    let (user, assistant) = (other_message("user"), other_message("assistant"));
    match role {
        "user" => vec![
            vec![message.clone()],
            vec![message.clone(), assistant, user],
            vec![other_message("system"), message],
        ],
        "assistant" => vec![
            vec![user.clone(), message.clone()],
            vec![user.clone(), message.clone(), user],
            vec![message],
        ],
        _ => vec![
            vec![message.clone(), user.clone()],
            vec![user.clone(), message.clone()],
            vec![user.clone(), assistant, message.clone(), user],
            vec![message],
        ],
    }
}

fn tool_conversations(
    content: &Value,
    other: ContentForm,
    arguments: ArgumentsForm,
) -> Vec<Vec<Value>> {
    let user = json!({"role": "user", "content": other.of(OTHER_TEXT)});
    let assistant = json!({"role": "assistant", "content": other.of(OTHER_TEXT)});
    let result = tool_message(content);
    let call = |content| call_message(arguments, content);
    vec![
        vec![user.clone(), call(CallMessageContent::Empty), result.clone()],
        vec![user.clone(), call(CallMessageContent::Absent), result.clone(), assistant.clone()],
        vec![user, assistant, result],
    ]
}

fn call_message(arguments: ArgumentsForm, content: CallMessageContent) -> Value {
    let function = json!({"name": TOOL, "arguments": arguments.value()});
    let call = json!({"id": CALL_ID, "type": "function", "function": function});
    match content {
        CallMessageContent::Empty => {
            json!({"role": "assistant", "content": "", "tool_calls": [call]})
        }
        CallMessageContent::Absent => json!({"role": "assistant", "tool_calls": [call]}),
    }
}

fn tool_message(content: &Value) -> Value {
    json!({"role": "tool", "tool_call_id": CALL_ID, "name": TOOL, "content": content})
}

fn trial_tool() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {KEY: {"type": "string", "description": OTHER_TEXT}},
        "required": [KEY],
    });
    let function = json!({"name": TOOL, "description": OTHER_TEXT, "parameters": parameters});
    json!({"type": "function", "function": function})
}
