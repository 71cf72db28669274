//! Complete output of a choice: reasoning, content and tool calls.

use super::choice::ChoiceFinish;
use super::collect::CollectedChoice;
use crate::request_ids::ToolCallIds;
use text::OutputPiece;

/// Tool call of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolCall {
    /// Id of the call.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// JSON object as text; incomplete if the call was truncated.
    pub arguments: String,
    /// Whether the output ended inside the call.
    pub truncated: bool,
}

/// Message of the assistant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AssistantMessage {
    /// Reasoning; empty if there is none, or without a reasoning parser.
    pub reasoning: String,
    /// Content; malformed calls are part of it.
    pub content: String,
    /// Tool calls.
    pub calls: Vec<ToolCall>,
}

impl AssistantMessage {
    /// Builds the message of choice number `choice`. It equals the sum of the chunks of a stream, except for
    /// malformed calls, which a stream cannot retract.
    pub(crate) fn of(whole: &CollectedChoice, choice: u32, names: &ToolCallIds) -> Self {
        let mut message = Self::default();
        let mut begun = 0;
        for (place, piece) in whole.pieces.iter().enumerate() {
            match piece {
                OutputPiece::Reasoning(text) => message.reasoning.push_str(text),
                OutputPiece::Content(text) => message.content.push_str(text),
                OutputPiece::Call { index, name, from } => {
                    begun = from;
                    let (id, name) = (names.id(choice, index), name.to_owned());
                    message.calls.push(ToolCall {
                        id,
                        name,
                        arguments: String::new(),
                        truncated: false,
                    });
                }
                OutputPiece::Arguments { text, .. } => {
                    if let Some(call) = message.calls.last_mut() {
                        call.arguments.push_str(text);
                    }
                }
                // The output was truncated inside the call, so the call may be valid: it is kept as
                // truncated.
                OutputPiece::Broken { .. }
                    if place + 1 == whole.pieces.len()
                        && matches!(whole.end, ChoiceFinish::Length | ChoiceFinish::Abort(_)) =>
                {
                    if let Some(call) = message.calls.last_mut() {
                        call.truncated = true;
                    }
                }
                OutputPiece::Broken { to, .. } => {
                    message.calls.pop();
                    message.content.push_str(whole.text.get(begun..to).unwrap_or_default());
                }
                OutputPiece::End { .. } => {}
            }
        }
        message
    }
}
