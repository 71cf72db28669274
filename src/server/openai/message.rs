//! What a choice became: reasoning, content and calls, whole.

use super::choice::End;
use super::collect::Whole;
use crate::server::ids::CallNames;
use crate::text::Piece;

/// A call of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// The function.
    pub name: String,
    /// A JSON object as text; of a call that was cut, as far as it came.
    pub arguments: String,
    /// Whether the output ended inside the call.
    pub cut: bool,
}

/// An assistant's message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Empty if it did not think, or if nobody looked.
    pub reasoning: String,
    /// What it said; malformed calls are part of it.
    pub content: String,
    /// What it called.
    pub calls: Vec<Call>,
}

impl Message {
    /// The message of choice number `choice`: the same as the chunks of its stream make, but for
    /// malformed calls, which a stream cannot take back.
    pub fn of(whole: &Whole, choice: u32, names: &CallNames) -> Self {
        let mut message = Self::default();
        let mut begun = 0;
        for (place, piece) in whole.pieces.iter().enumerate() {
            match piece {
                Piece::Reasoning(text) => message.reasoning.push_str(text),
                Piece::Content(text) => message.content.push_str(text),
                Piece::Call { index, name, from } => {
                    begun = from;
                    let (id, name) = (names.id(choice, index), name.to_owned());
                    message.calls.push(Call { id, name, arguments: String::new(), cut: false });
                }
                Piece::Arguments { text, .. } => {
                    if let Some(call) = message.calls.last_mut() {
                        call.arguments.push_str(text);
                    }
                }
                // The output was cut, so nobody knows that the call would have been none.
                Piece::Broken { .. }
                    if place + 1 == whole.pieces.len()
                        && matches!(whole.end, End::Length | End::Abort(_)) =>
                {
                    if let Some(call) = message.calls.last_mut() {
                        call.cut = true;
                    }
                }
                Piece::Broken { to, .. } => {
                    message.calls.pop();
                    message.content.push_str(whole.text.get(begun..to).unwrap_or_default());
                }
                Piece::End { .. } => {}
            }
        }
        message
    }
}
