//! Items of a conversation, ordered and indexed by id.

use crate::template_value_json::TemplateValueJson;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// Memory overhead of an item in bytes, in addition to its text and its id, which a sequence stores twice.
pub(super) const ITEM_BYTES: usize = 240;

/// Item of a conversation or a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConversationItem {
    pub(crate) id: String,
    /// JSON object of the item, including its id.
    pub(crate) body: String,
}

impl ConversationItem {
    /// Creates an item from the JSON object `item`. If the object has no id, its id becomes `<type
    /// prefix>_<scope>_<next>`, and `next` is incremented.
    pub(crate) fn new(mut item: Value, scope: &str, next: &mut u64) -> Self {
        if item["id"].as_str().is_none() {
            let prefix = match item["type"].as_str().unwrap_or_default() {
                "message" => "msg",
                "reasoning" => "rs",
                "function_call" => "fc",
                "function_call_output" => "fco",
                "custom_tool_call" => "ctc",
                "custom_tool_call_output" => "ctco",
                _ => "item",
            };
            item["id"] = Value::from(format!("{prefix}_{scope}_{next}"));
            *next += 1;
        }
        let id = item["id"].as_str().unwrap_or_default().to_owned();
        Self { id, body: TemplateValueJson(&item).text() }
    }

    /// Returns the number of bytes that the item occupies in a store.
    pub(crate) fn stored_bytes(&self) -> usize {
        2 * self.id.len() + self.body.len() + ITEM_BYTES
    }
}

/// Items in the order in which they were appended.
#[derive(Debug, Default)]
pub(crate) struct ItemSequence {
    items: BTreeMap<u64, ConversationItem>,
    /// For each item id, the key of the item in `items`.
    keys: HashMap<String, u64>,
    /// Key of the next item.
    next_key: u64,
    bytes: usize,
}

impl ItemSequence {
    /// Returns all items.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ConversationItem> {
        self.items.values()
    }

    /// Returns the number of bytes that the items occupy in a store.
    pub(super) fn stored_bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the item with the id `id`.
    pub(super) fn get(&self, id: &str) -> Option<&ConversationItem> {
        self.items.get(self.keys.get(id)?)
    }

    /// Appends an item. An earlier item with the same id is removed.
    pub(super) fn push(&mut self, item: ConversationItem) {
        self.remove(&item.id);
        self.bytes += item.stored_bytes();
        self.keys.insert(item.id.clone(), self.next_key);
        self.items.insert(self.next_key, item);
        self.next_key += 1;
    }

    /// Removes the item with the id `id`; returns whether the item existed.
    pub(super) fn remove(&mut self, id: &str) -> bool {
        let item = self.keys.remove(id).and_then(|key| self.items.remove(&key));
        self.bytes -= item.as_ref().map_or(0, ConversationItem::stored_bytes);
        item.is_some()
    }
}
