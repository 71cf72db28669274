//! Output items of the Responses API: reasoning, messages and function calls.

use crate::openai::assistant_message::AssistantMessage;
use crate::request_ids::ToolCallIds;
use serde::Serialize;
use serde_json::{Map, Value, json};

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
        arguments: String,
        status: OutputItemStatus,
    },
}

/// JSON form of the text content of an item.
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

impl OutputItemContent {
    pub(super) fn output(text: String) -> Self {
        Self::OutputText { text, annotations: [], logprobs: [] }
    }
}

/// Generates the item ids of one response: `rs_…`, `msg_…`, `fc_…`.
#[derive(Debug, Clone)]
pub(super) struct OutputItemIds {
    pub(super) request_id: String,
    pub(super) tool_call_ids: ToolCallIds,
}

impl OutputItemIds {
    pub(super) fn reasoning(&self, index: usize) -> String {
        format!("rs_{}_{index}", self.request_id)
    }

    pub(super) fn message(&self, index: usize) -> String {
        format!("msg_{}_{index}", self.request_id)
    }

    pub(super) fn call(&self, index: usize) -> String {
        format!("fc_{}_{index}", self.request_id)
    }
}

/// Builds the output items of a complete output; they equal those of a stream. If the output was truncated,
/// the last item is incomplete.
pub(super) fn of_message(
    message: AssistantMessage,
    item_ids: &OutputItemIds,
    truncated: bool,
) -> Vec<ResponseOutputItem> {
    let AssistantMessage { reasoning, content, calls } = message;
    let status_of = |is_last: bool| {
        if truncated && is_last {
            OutputItemStatus::Incomplete
        } else {
            OutputItemStatus::Completed
        }
    };
    let mut items = Vec::new();
    if !reasoning.is_empty() {
        let status = status_of(content.is_empty() && calls.is_empty());
        let content = vec![OutputItemContent::ReasoningText { text: reasoning }];
        items.push(ResponseOutputItem::Reasoning {
            id: item_ids.reasoning(0),
            summary: [],
            content,
            status,
        });
    }
    if !content.is_empty() || calls.is_empty() && items.is_empty() {
        let (id, status) = (item_ids.message(items.len()), status_of(calls.is_empty()));
        items.push(message_item(id, content, status));
    }
    for call in calls {
        items.push(ResponseOutputItem::FunctionCall {
            id: item_ids.call(items.len()),
            call_id: call.id,
            name: call.name,
            arguments: call.arguments,
            status: if call.truncated {
                OutputItemStatus::Incomplete
            } else {
                OutputItemStatus::Completed
            },
        });
    }
    items
}

/// Builds a message item that contains one text.
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

/// Converts a function call to a tool call of a chat template; `None` if it is incomplete or malformed.
fn template_call(item: &ResponseOutputItem) -> Option<Value> {
    let ResponseOutputItem::FunctionCall { call_id, name, arguments, status, .. } = item else {
        return None;
    };
    let arguments: Value = serde_json::from_str(arguments).ok()?;
    let is_valid = *status == OutputItemStatus::Completed && arguments.is_object();
    let function = json!({"name": name, "arguments": arguments});
    is_valid.then(|| json!({"id": call_id, "type": "function", "function": function}))
}

/// Converts the output items to an assistant message of a chat template, for requests that continue the
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
            ResponseOutputItem::FunctionCall { .. } => calls.extend(template_call(item)),
        }
    }
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
