//! Output items of the Responses API: reasoning, messages, function calls and custom tool calls.

use super::item_scope::ItemIdScope;
use super::tool_names::{CalledTool, ToolNameMap, function_name};
use crate::openai::assistant_message::{AssistantMessage, AssistantMessagePart};
use crate::openai::chat::custom_input::CustomToolInputDecoder;
use crate::openai::chat::custom_tools::INPUT;
use crate::request_ids::ToolCallIdGenerator;
use serde::Serialize;
use serde_json::{Map, Value, json};
use text::closed_arguments;

/// JSON form of one output item.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ResponseOutputItem {
    Reasoning {
        id: String,
        summary: [(); 0],
        content: Vec<OutputItemContent>,
        status: OutputItemStatus,
    },
    Message {
        id: String,
        role: &'static str,
        content: Vec<OutputItemContent>,
        status: OutputItemStatus,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        arguments: String,
        status: OutputItemStatus,
    },
    CustomToolCall {
        id: String,
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        input: String,
        status: OutputItemStatus,
    },
}

/// JSON form of one content part of an item.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItemContent {
    ReasoningText { text: String },
    OutputText { text: String, annotations: [(); 0], logprobs: [(); 0] },
}

/// Value of an item's `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OutputItemStatus {
    InProgress,
    Completed,
    Incomplete,
}

impl ResponseOutputItem {
    /// Returns the id of the item.
    pub(super) fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. }
            | Self::Message { id, .. }
            | Self::FunctionCall { id, .. }
            | Self::CustomToolCall { id, .. } => id,
        }
    }
}

impl OutputItemContent {
    pub(super) fn output(text: String) -> Self {
        Self::OutputText { text, annotations: [], logprobs: [] }
    }
}

/// Generates the output item ids of one response, and builds its tool call items.
#[derive(Debug, Clone)]
pub(super) struct OutputItemIdGenerator {
    pub(super) scope: ItemIdScope,
    /// Number of input items, which precede the output items in the numbering of ids.
    pub(super) input_items: usize,
    pub(super) tool_call_ids: ToolCallIdGenerator,
    pub(super) tool_names: ToolNameMap,
}

impl OutputItemIdGenerator {
    /// Returns the id of a reasoning item.
    pub(super) fn reasoning(&self, index: usize) -> String {
        self.id("rs", index)
    }

    /// Returns the id of a message.
    pub(super) fn message(&self, index: usize) -> String {
        self.id("msg", index)
    }

    fn id(&self, prefix: &str, index: usize) -> String {
        format!("{prefix}_{}_{}", self.scope.as_str(), self.input_items + index)
    }

    /// Builds the output item for a call of `function`: a function call or a custom tool call.
    pub(super) fn call(
        &self,
        index: usize,
        call_id: String,
        function: &str,
        arguments: String,
        status: OutputItemStatus,
    ) -> ResponseOutputItem {
        let CalledTool { namespace, name, is_custom } = self.tool_names.called(function);
        if is_custom {
            let (id, input) = (self.id("ctc", index), CustomToolInputDecoder::decode(&arguments));
            return ResponseOutputItem::CustomToolCall {
                id,
                call_id,
                name,
                namespace,
                input,
                status,
            };
        }
        let id = self.id("fc", index);
        ResponseOutputItem::FunctionCall { id, call_id, name, namespace, arguments, status }
    }
}

fn item_status(is_truncated: bool) -> OutputItemStatus {
    if is_truncated { OutputItemStatus::Incomplete } else { OutputItemStatus::Completed }
}

/// Builds the output items of a complete output; they equal the items of a stream. If the output was
/// truncated, the last item has the status incomplete.
pub(super) fn of_message(
    message: AssistantMessage,
    item_ids: &OutputItemIdGenerator,
    truncated: bool,
) -> Vec<ResponseOutputItem> {
    let count = message.parts.len();
    if count == 0 {
        return vec![message_item(item_ids.message(0), String::new(), item_status(truncated))];
    }
    let text_status = |index: usize| item_status(truncated && index + 1 == count);
    let items = message.parts.into_iter().enumerate().map(|(index, part)| match part {
        AssistantMessagePart::Reasoning(text) => ResponseOutputItem::Reasoning {
            id: item_ids.reasoning(index),
            summary: [],
            content: vec![OutputItemContent::ReasoningText { text }],
            status: text_status(index),
        },
        AssistantMessagePart::Content(text) => {
            message_item(item_ids.message(index), text, text_status(index))
        }
        AssistantMessagePart::Call(call) => {
            let status = item_status(call.truncated);
            item_ids.call(index, call.id, &call.name, call.arguments, status)
        }
    });
    items.collect()
}

/// Builds a message item with one text part.
pub(super) fn message_item(
    id: String,
    text: String,
    status: OutputItemStatus,
) -> ResponseOutputItem {
    ResponseOutputItem::Message {
        id,
        role: "assistant",
        content: vec![OutputItemContent::output(text)],
        status,
    }
}

/// Builds a tool call in the form expected by chat templates.
pub(super) fn template_call(
    call_id: &str,
    namespace: Option<&str>,
    name: &str,
    arguments: &Value,
) -> Value {
    let function = json!({"name": function_name(namespace, name), "arguments": arguments});
    json!({"id": call_id, "type": "function", "function": function})
}

/// Parses the arguments of an earlier call, which may be truncated, for use in a chat template.
pub(super) fn template_arguments(arguments: &str) -> Value {
    Value::Object(closed_arguments(arguments))
}

/// Converts the output items to an assistant message for the chat template, for requests that continue the
/// response.
pub(super) fn assistant_turn(items: &[ResponseOutputItem]) -> Value {
    let (mut output_text, mut reasoning_text, mut calls) =
        (String::new(), String::new(), Vec::new());
    for item in items {
        match item {
            ResponseOutputItem::Reasoning { content, .. }
            | ResponseOutputItem::Message { content, .. } => {
                for part in content {
                    match part {
                        OutputItemContent::ReasoningText { text } => reasoning_text.push_str(text),
                        OutputItemContent::OutputText { text, .. } => output_text.push_str(text),
                    }
                }
            }
            ResponseOutputItem::FunctionCall { call_id, name, namespace, arguments, .. } => {
                let arguments = template_arguments(arguments);
                calls.push(template_call(call_id, namespace.as_deref(), name, &arguments));
            }
            ResponseOutputItem::CustomToolCall { call_id, name, namespace, input, .. } => {
                let arguments = json!({INPUT: input});
                calls.push(template_call(call_id, namespace.as_deref(), name, &arguments));
            }
        }
    }
    template_turn(output_text, reasoning_text, calls)
}

/// Returns the assistant message with these texts and tool calls for the chat template.
fn template_turn(output_text: String, reasoning_text: String, calls: Vec<Value>) -> Value {
    let mut turn = Map::new();
    turn.insert("role".to_owned(), Value::from("assistant"));
    turn.insert("content".to_owned(), Value::from(output_text));
    if !reasoning_text.is_empty() {
        turn.insert("reasoning_content".to_owned(), Value::from(reasoning_text));
    }
    if !calls.is_empty() {
        turn.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Value::Object(turn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use text::ToolCallIdFormat;

    #[test]
    fn output_ids_follow_those_of_the_input() {
        let ids = OutputItemIdGenerator {
            scope: ItemIdScope::new("0a1b", None),
            input_items: 3,
            tool_call_ids: ToolCallIdGenerator::new(1, ToolCallIdFormat::Long, 0),
            tool_names: ToolNameMap::default(),
        };
        assert_eq!((ids.message(12), ids.reasoning(0)), ("msg_0a1b_15".into(), "rs_0a1b_3".into()));
    }

    #[test]
    fn truncated_arguments_are_closed() {
        assert_eq!(template_arguments("{\"a\": 1}"), json!({"a": 1}));
        assert_eq!(template_arguments("{\"a\": 1, \"b\": \"x"), json!({"a": 1, "b": "x"}));
        for other in ["", "not JSON", "[1]"] {
            assert_eq!(template_arguments(other), json!({}), "{other}");
        }
    }
}
