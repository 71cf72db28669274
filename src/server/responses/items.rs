//! Items of a response's output, and how they are put together out of pieces.

use crate::server::ids::CallNames;
use crate::server::openai::message::Message;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// One item of the output.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Item {
    Reasoning { id: String, summary: [(); 0], content: Vec<Content>, status: Status },
    Message { id: String, role: &'static str, content: Vec<Content>, status: Status },
    FunctionCall { id: String, call_id: String, name: String, arguments: String, status: Status },
}

/// Text inside an item.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Content {
    ReasoningText { text: String },
    OutputText { text: String, annotations: [(); 0], logprobs: [(); 0] },
}

/// How far an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    InProgress,
    Completed,
    Incomplete,
}

impl Content {
    pub(super) fn output(text: String) -> Self {
        Self::OutputText { text, annotations: [], logprobs: [] }
    }
}

/// Names the items of one response: `rs_…`, `msg_…`, `fc_…`.
#[derive(Debug, Clone)]
pub(super) struct ItemNames {
    pub(super) request_id: String,
    pub(super) calls: CallNames,
}

impl ItemNames {
    pub(super) fn reasoning(&self, place: usize) -> String {
        format!("rs_{}_{place}", self.request_id)
    }

    pub(super) fn message(&self, place: usize) -> String {
        format!("msg_{}_{place}", self.request_id)
    }

    pub(super) fn call(&self, place: usize) -> String {
        format!("fc_{}_{place}", self.request_id)
    }
}

/// The items of a whole answer: the same as its stream makes. Where it was cut, the last is incomplete.
pub(super) fn of_message(message: Message, names: &ItemNames, cut: bool) -> Vec<Item> {
    let Message { reasoning, content, calls } = message;
    let up_to_cut = |is_last: bool| {
        if cut && is_last { Status::Incomplete } else { Status::Completed }
    };
    let mut items = Vec::new();
    if !reasoning.is_empty() {
        let status = up_to_cut(content.is_empty() && calls.is_empty());
        let content = vec![Content::ReasoningText { text: reasoning }];
        items.push(Item::Reasoning { id: names.reasoning(0), summary: [], content, status });
    }
    if !content.is_empty() || calls.is_empty() && items.is_empty() {
        let (id, status) = (names.message(items.len()), up_to_cut(calls.is_empty()));
        items.push(message_item(id, content, status));
    }
    for call in calls {
        items.push(Item::FunctionCall {
            id: names.call(items.len()),
            call_id: call.id,
            name: call.name,
            arguments: call.arguments,
            status: if call.cut { Status::Incomplete } else { Status::Completed },
        });
    }
    items
}

/// A message of one text.
pub(super) fn message_item(id: String, text: String, status: Status) -> Item {
    Item::Message { id, role: "assistant", content: vec![Content::output(text)], status }
}

/// The items as the message of a chat template, for the next turn.
pub(super) fn as_turn(items: &[Item]) -> Value {
    let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for item in items {
        match item {
            Item::Reasoning { content, .. } | Item::Message { content, .. } => {
                for part in content {
                    match part {
                        Content::ReasoningText { text } => thought.push_str(text),
                        Content::OutputText { text, .. } => said.push_str(text),
                    }
                }
            }
            Item::FunctionCall { call_id, name, arguments, status, .. } => {
                let arguments: Value = serde_json::from_str(arguments).unwrap_or_default();
                if *status == Status::Completed && arguments.is_object() {
                    calls.push(json!({"id": call_id, "type": "function",
                        "function": {"name": name, "arguments": arguments}}));
                }
            }
        }
    }
    let mut turn = Map::new();
    turn.insert("role".to_owned(), Value::from("assistant"));
    turn.insert("content".to_owned(), Value::from(said));
    if !thought.is_empty() {
        turn.insert("reasoning_content".to_owned(), Value::from(thought));
    }
    if !calls.is_empty() {
        turn.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Value::Object(turn)
}
