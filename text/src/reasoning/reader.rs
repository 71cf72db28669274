//! Finds the end of an output's reasoning for the thinking budget, with the same parser that splits replies
//! into reasoning and content.

use super::ReasoningSplitter;
use crate::detokenizer::Detokenizer;
use grammar::{ReasoningState, ReasoningTracker};
use protocol::Token;

/// Tracks token by token whether an output is inside its reasoning.
#[derive(Debug, Clone)]
pub struct TokenReasoningTracker {
    detokenizer: Detokenizer,
    splitter: ReasoningSplitter,
    scratch: String,
}

impl TokenReasoningTracker {
    pub(crate) fn new(detokenizer: Detokenizer, splitter: ReasoningSplitter) -> Self {
        Self { detokenizer, splitter, scratch: String::new() }
    }
}

impl ReasoningTracker for TokenReasoningTracker {
    fn push(&mut self, token: Token) {
        self.scratch.clear();
        self.detokenizer.push(token, &mut self.scratch);
        for c in self.scratch.chars() {
            self.splitter.push(c, &mut |_, _| {});
        }
    }

    fn state(&self) -> ReasoningState {
        if self.splitter.is_after() {
            ReasoningState::After
        } else if self.splitter.is_inside() {
            ReasoningState::Inside { at_character_boundary: !self.detokenizer.has_pending() }
        } else {
            ReasoningState::Before
        }
    }

    fn boxed_clone(&self) -> Box<dyn ReasoningTracker> {
        Box::new(self.clone())
    }
}
