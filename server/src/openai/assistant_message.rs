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

/// Part of an assistant message: a block of `/v1/messages`, or an item of `/v1/responses`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AssistantMessagePart {
    /// Reasoning text, not empty.
    Reasoning(String),
    /// Content, not empty; it includes the text of malformed tool calls.
    Content(String),
    /// Complete or truncated tool call.
    Call(ToolCall),
}

/// Complete output of a choice, as an assistant message. Adjacent parts of text are of different kinds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AssistantMessage {
    /// Parts in the order of the output.
    pub parts: Vec<AssistantMessagePart>,
}

/// Assistant message of the chat API, in which content and calls have no common order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ChatAssistantMessage {
    /// Reasoning text; empty if the output has none or the model has no reasoning parser.
    pub reasoning: String,
    /// Content.
    pub content: String,
    /// Tool calls.
    pub calls: Vec<ToolCall>,
}

impl AssistantMessage {
    /// Builds the message of choice `choice_index`. The parts equal those of a stream, except for malformed calls: chunks
    /// already sent cannot be retracted.
    pub(crate) fn of(
        choice: &CollectedChoice,
        choice_index: u32,
        tool_call_ids: &ToolCallIdGenerator,
    ) -> Self {
        let mut message = Self::default();
        let mut call_start = 0;
        for (position, piece) in choice.pieces.iter().enumerate() {
            match piece {
                OutputPiece::Reasoning(text) => message.push_reasoning(text),
                OutputPiece::Content(text) => message.push_content(text),
                OutputPiece::Call { index, name, from } => {
                    call_start = from;
                    let (id, name) = (tool_call_ids.id(choice_index, index, name), name.to_owned());
                    let call = ToolCall { id, name, arguments: String::new(), truncated: false };
                    message.parts.push(AssistantMessagePart::Call(call));
                }
                OutputPiece::Arguments { text, .. } => {
                    if let Some(call) = message.last_call() {
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
                    if let Some(call) = message.last_call() {
                        call.truncated = true;
                    }
                }
                OutputPiece::Broken { to, .. } => {
                    if message.last_call().is_some() {
                        message.parts.pop();
                    }
                    message.push_content(choice.text.get(call_start..to).unwrap_or_default());
                }
                OutputPiece::End { .. } => {}
            }
        }
        message
    }

    /// Converts the message to the form of the chat API.
    pub(crate) fn into_chat(self) -> ChatAssistantMessage {
        let mut message = ChatAssistantMessage::default();
        for part in self.parts {
            match part {
                AssistantMessagePart::Reasoning(text) => message.reasoning.push_str(&text),
                AssistantMessagePart::Content(text) => message.content.push_str(&text),
                AssistantMessagePart::Call(call) => message.calls.push(call),
            }
        }
        message
    }

    /// Returns the last part if it is a call.
    fn last_call(&mut self) -> Option<&mut ToolCall> {
        match self.parts.last_mut() {
            Some(AssistantMessagePart::Call(call)) => Some(call),
            _ => None,
        }
    }

    fn push_reasoning(&mut self, text: &str) {
        match self.parts.last_mut() {
            Some(AssistantMessagePart::Reasoning(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.parts.push(AssistantMessagePart::Reasoning(text.to_owned())),
        }
    }

    fn push_content(&mut self, text: &str) {
        match self.parts.last_mut() {
            Some(AssistantMessagePart::Content(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.parts.push(AssistantMessagePart::Content(text.to_owned())),
        }
    }
}
