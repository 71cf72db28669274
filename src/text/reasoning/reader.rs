//! Where an output's reasoning ends, for who limits it: read as replies are.

use super::Splitter;
use crate::grammar::{Reader, Reading};
use crate::text::detokenizer::Detokenizer;
use protocol::Token;

/// Reads one output, token by token.
#[derive(Debug, Clone)]
pub struct ReasoningReader {
    detokenizer: Detokenizer,
    splitter: Splitter,
    scratch: String,
}

impl ReasoningReader {
    pub(in crate::text) fn new(detokenizer: Detokenizer, splitter: Splitter) -> Self {
        Self { detokenizer, splitter, scratch: String::new() }
    }
}

impl Reader for ReasoningReader {
    fn push(&mut self, token: Token) {
        self.scratch.clear();
        self.detokenizer.push(token, &mut self.scratch);
        for c in self.scratch.chars() {
            self.splitter.push(c, &mut |_, _| {});
        }
    }

    fn stands(&self) -> Reading {
        if self.splitter.is_behind() {
            Reading::Behind
        } else if self.splitter.is_inside() {
            Reading::Inside { whole: !self.detokenizer.is_holding() }
        } else {
            Reading::Before
        }
    }
}
