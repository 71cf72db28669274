//! Input and output items of a stored response. GET requests list them, and later requests refer to them.

use super::item_scope::ItemIdScope;
use super::items::ResponseOutputItem;
use crate::conversations::{ConversationItem, stored_form};
use serde_json::Value;
use std::sync::Arc;

/// Items of one stored response.
#[derive(Debug, Default)]
pub(super) struct ResponseItems {
    /// Id of the response that this response continues.
    pub(super) previous: Option<String>,
    pub(super) input: Arc<[ConversationItem]>,
    pub(super) output: Vec<ConversationItem>,
}

impl ResponseItems {
    /// Creates the items of a response without output. `input` contains template values, which get ids with
    /// the scope `scope`.
    pub(super) fn of_input(
        previous: Option<String>,
        input: Vec<Value>,
        scope: &ItemIdScope,
    ) -> Self {
        let mut next = 0;
        let item = |item| ConversationItem::new(stored_form(item), scope.as_str(), &mut next);
        Self { previous, input: input.into_iter().map(item).collect(), output: Vec::new() }
    }

    /// Returns a copy of the items with the given output.
    pub(super) fn with_output(&self, output: &[ResponseOutputItem]) -> Self {
        let stored = |item: &ResponseOutputItem| {
            let body = serde_json::to_string(item).unwrap_or_default();
            ConversationItem { id: item.id().to_owned(), body }
        };
        let output = output.iter().map(stored).collect();
        Self { previous: self.previous.clone(), input: Arc::clone(&self.input), output }
    }

    /// Returns the item with the id `item_id`. The number at the end of the id is the position of the item.
    pub(super) fn item(&self, item_id: &str) -> Option<&ConversationItem> {
        let position: usize = item_id.rsplit('_').next()?.parse().ok()?;
        let inputs = self.input.len();
        let item = match position.checked_sub(inputs) {
            Some(position) => self.output.get(position),
            None => self.input.get(position),
        };
        item.filter(|item| item.id == item_id)
    }

    /// Returns all items: first the input, then the output.
    pub(super) fn all(&self) -> impl Iterator<Item = &ConversationItem> {
        self.input.iter().chain(&self.output)
    }

    /// Returns the number of bytes that the items occupy in a store.
    pub(super) fn stored_bytes(&self) -> usize {
        self.all().map(ConversationItem::stored_bytes).sum()
    }
}
