//! Finds the end of an output's reasoning for the thinking budget, with the same parser that splits replies
//! into reasoning and content.

use super::ReasoningSplitter;
use crate::detokenizer::Detokenizer;
use crate::harmony::HarmonyParser;
use crate::output_pieces::{OutputPieceWriter, OutputPieces};
use grammar::{ReasoningState, ReasoningTracker};
use protocol::Token;

/// Parser whose position relative to the reasoning is tracked.
#[derive(Debug, Clone)]
pub(crate) enum TrackedSections {
    /// Parser of reasoning between two markers.
    Separate(ReasoningSplitter),
    /// Parser of the harmony format.
    Harmony(HarmonyParser),
}

/// Tracks token by token whether an output is inside its reasoning.
#[derive(Debug, Clone)]
pub struct TokenReasoningTracker {
    detokenizer: Detokenizer,
    sections: TrackedSections,
    scratch: String,
    /// Pieces of the output, which are dropped.
    pieces: OutputPieces,
    /// Length in bytes of the output so far, in the harmony format.
    bytes_read: usize,
}

impl TokenReasoningTracker {
    pub(crate) fn new(detokenizer: Detokenizer, sections: TrackedSections) -> Self {
        let pieces = OutputPieces::default();
        Self { detokenizer, sections, scratch: String::new(), pieces, bytes_read: 0 }
    }
}

impl ReasoningTracker for TokenReasoningTracker {
    fn push(&mut self, token: Token) {
        self.scratch.clear();
        self.detokenizer.push(token, &mut self.scratch);
        match &mut self.sections {
            TrackedSections::Separate(splitter) => {
                self.scratch.chars().for_each(|c| splitter.push(c, &mut |_, _| {}));
            }
            TrackedSections::Harmony(parser) => {
                for c in self.scratch.chars() {
                    self.bytes_read += c.len_utf8();
                    parser.push(c, &mut OutputPieceWriter::new(&mut self.pieces, self.bytes_read));
                }
                self.pieces.clear();
            }
        }
    }

    fn state(&self) -> ReasoningState {
        let at_character_boundary = !self.detokenizer.has_pending();
        match &self.sections {
            TrackedSections::Separate(splitter) if splitter.is_after() => ReasoningState::After,
            TrackedSections::Separate(splitter) if splitter.is_inside() => {
                ReasoningState::Inside { at_character_boundary }
            }
            TrackedSections::Separate(_) => ReasoningState::Before,
            TrackedSections::Harmony(parser) => parser.reasoning_state(at_character_boundary),
        }
    }

    fn boxed_clone(&self) -> Box<dyn ReasoningTracker> {
        Box::new(self.clone())
    }
}
