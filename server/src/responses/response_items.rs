//! Items of a stored response: its input and its output, which GET requests list and later requests refer to.

use super::items::ResponseOutputItem;
use crate::conversations::{ConversationItem, stored_form};
use serde_json::Value;
use std::sync::Arc;

/// Items of one stored response.
#[derive(Debug, Default)]
pub(super) struct ResponseItems {
    /// Id of the response that it continues.
    pub(super) previous: Option<String>,
    pub(super) input: Arc<[ConversationItem]>,
    pub(super) output: Vec<ConversationItem>,
}

impl ResponseItems {
    /// Creates the items of a response without output. `hex` is the hexadecimal part of its id.
    pub(super) fn of_input(previous: Option<String>, input: Vec<Value>, hex: &str) -> Self {
        let mut next = 0;
        let item = |item| ConversationItem::new(stored_form(item), hex, &mut next);
        Self { previous, input: input.into_iter().map(item).collect(), output: Vec::new() }
    }

    /// Returns the items with the output of the response.
    pub(super) fn with_output(&self, output: &[ResponseOutputItem], hex: &str) -> Self {
        let values = output.iter().filter_map(|item| serde_json::to_value(item).ok());
        let output = values.map(|item| ConversationItem::new(item, hex, &mut 0)).collect();
        Self { previous: self.previous.clone(), input: Arc::clone(&self.input), output }
    }

    /// Returns all items, the input first.
    pub(super) fn all(&self) -> impl Iterator<Item = &ConversationItem> {
        self.input.iter().chain(&self.output)
    }

    /// Returns the bytes that the items take in a store.
    pub(super) fn stored_bytes(&self) -> usize {
        self.all().map(ConversationItem::stored_bytes).sum()
    }
}
