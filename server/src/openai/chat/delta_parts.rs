//! Output parts that a streaming chat completion sends: pieces of the parsed output, in which the arguments
//! of custom tools are decoded to plain input text.

use super::custom_input::CustomToolInputDecoder;
use super::custom_tools::CustomToolNames;
use std::collections::HashMap;
use text::OutputPiece;

/// Part of the output that one chunk contains.
pub(super) enum ChatDeltaPart<'a> {
    Reasoning(&'a str),
    Content(&'a str),
    /// Start of a tool call.
    Call {
        index: u32,
        name: &'a str,
        is_custom: bool,
    },
    Arguments {
        index: u32,
        text: &'a str,
    },
    /// Next part of the input text of a custom tool call.
    Input {
        index: u32,
        text: String,
    },
}

/// Decoders of unfinished custom tool calls, by choice.
#[derive(Debug, Default)]
pub(super) struct CustomToolCallDecoders {
    by_choice: HashMap<u32, CustomToolInputDecoder>,
}

impl CustomToolCallDecoders {
    /// Converts a piece of the parsed output of `choice` to the part that is sent to the client; `None` =
    /// nothing is sent. If a tool call turns out to be malformed, nothing more of the call is sent; chunks
    /// already sent cannot be retracted.
    pub(super) fn part<'a>(
        &mut self,
        choice: u32,
        piece: OutputPiece<'a>,
        custom_tools: &CustomToolNames,
    ) -> Option<ChatDeltaPart<'a>> {
        match piece {
            OutputPiece::Reasoning(text) => Some(ChatDeltaPart::Reasoning(text)),
            OutputPiece::Content(text) => Some(ChatDeltaPart::Content(text)),
            OutputPiece::Call { index, name, .. } => {
                let is_custom = custom_tools.contains(name);
                if is_custom {
                    self.by_choice.insert(choice, CustomToolInputDecoder::default());
                }
                Some(ChatDeltaPart::Call { index, name, is_custom })
            }
            OutputPiece::Arguments { index, text } => match self.by_choice.get_mut(&choice) {
                None => Some(ChatDeltaPart::Arguments { index, text }),
                Some(decoder) => input(index, decoder.push(text)),
            },
            OutputPiece::End { index } | OutputPiece::Broken { index, .. } => {
                let mut decoder = self.by_choice.remove(&choice)?;
                input(index, decoder.finish())
            }
        }
    }
}

fn input<'a>(index: u32, text: String) -> Option<ChatDeltaPart<'a>> {
    (!text.is_empty()).then_some(ChatDeltaPart::Input { index, text })
}
