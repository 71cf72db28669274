//! Assembles the complete output of a choice: reasoning, content and tool calls.

use super::choice::ChoiceFinishReason;
use super::collect::CollectedChoice;
use crate::request_ids::ToolCallIdGenerator;
use text::OutputPiece;

/// Tool call in the output of a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolCall {
    /// Id of the call.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// Arguments as JSON object text; incomplete if the call was truncated.
    pub arguments: String,
    /// Whether the output ended inside this call.
    pub truncated: bool,
}

/// Complete output of a choice, as an assistant message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AssistantMessage {
    /// Reasoning text; empty if the output has none or the model has no reasoning parser.
    pub reasoning: String,
    /// Content; it includes the text of malformed tool calls.
    pub content: String,
    /// Complete and truncated tool calls.
    pub calls: Vec<ToolCall>,
}

impl AssistantMessage {
    /// Builds the message of choice `choice_index`. The message equals the concatenated chunks of a stream,
    /// except for malformed calls: chunks already sent cannot be retracted.
    pub(crate) fn of(
        choice: &CollectedChoice,
        choice_index: u32,
        tool_call_ids: &ToolCallIdGenerator,
    ) -> Self {
        let mut message = Self::default();
        let mut call_start = 0;
        for (position, piece) in choice.pieces.iter().enumerate() {
            match piece {
                OutputPiece::Reasoning(text) => message.reasoning.push_str(text),
                OutputPiece::Content(text) => message.content.push_str(text),
                OutputPiece::Call { index, name, from } => {
                    call_start = from;
                    let (id, name) = (tool_call_ids.id(choice_index, index, name), name.to_owned());
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
                // A call that the end of the output cuts off is not malformed; it is kept and marked as
                // truncated.
                OutputPiece::Broken { .. }
                    if position + 1 == choice.pieces.len()
                        && matches!(
                            choice.end,
                            ChoiceFinishReason::Length | ChoiceFinishReason::Abort(_)
                        ) =>
                {
                    if let Some(call) = message.calls.last_mut() {
                        call.truncated = true;
                    }
                }
                OutputPiece::Broken { to, .. } => {
                    message.calls.pop();
                    message.content.push_str(choice.text.get(call_start..to).unwrap_or_default());
                }
                OutputPiece::End { .. } => {}
            }
        }
        message
    }
}
