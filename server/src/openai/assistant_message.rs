//! What a choice became: reasoning, content and calls, whole.

use super::choice::ChoiceFinish;
use super::collect::CollectedChoice;
use crate::request_ids::ToolCallIds;
use text::OutputPiece;

/// A call of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolCall {
    /// Its id.
    pub id: String,
    /// The function.
    pub name: String,
    /// A JSON object as text; of a call that was cut, as far as it came.
    pub arguments: String,
    /// Whether the output ended inside the call.
    pub truncated: bool,
}

/// An assistant's message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AssistantMessage {
    /// Empty if it did not think, or if nobody looked.
    pub reasoning: String,
    /// What it said; malformed calls are part of it.
    pub content: String,
    /// What it called.
    pub calls: Vec<ToolCall>,
}

impl AssistantMessage {
    /// The message of choice number `choice`: the same as the chunks of its stream make, but for
    /// malformed calls, which a stream cannot take back.
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
                // The output was cut, so nobody knows that the call would have been none.
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
