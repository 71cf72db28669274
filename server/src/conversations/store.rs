//! Store of conversations and their items.

use crate::api_error::ApiError;
use crate::auth::CallerIdentity;
use crate::object_lru::{ObjectLru, StoredObject};
use serde_json::Value;
use std::sync::{Mutex, PoisonError};

/// Maximum size of all stored conversations, in bytes.
const STORE_BYTES: usize = 64 << 20;
/// Maximum size of one conversation that a request may extend, in bytes.
const CONVERSATION_BYTES_MAX: usize = 16 << 20;
/// Bytes that an item takes in addition to its text.
const ITEM_BYTES: usize = 64;

/// Item of a conversation or a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConversationItem {
    pub(crate) id: String,
    /// JSON object of the item, with its id.
    pub(crate) body: String,
}

/// Fields of a conversation other than its items.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ConversationInfo {
    /// Creation time: Unix time in seconds.
    pub(crate) created: u64,
    pub(crate) metadata: Value,
}

/// Conversation of one caller; it is visible to no other caller.
struct StoredConversation {
    owner: CallerIdentity,
    info: ConversationInfo,
    /// Bytes of the metadata.
    info_bytes: usize,
    items: Vec<ConversationItem>,
    /// Bytes of all items.
    item_bytes: usize,
    /// Number of the next item that gets an id of this conversation.
    next: u64,
}

impl StoredObject for StoredConversation {
    fn owner(&self) -> CallerIdentity {
        self.owner
    }

    fn text_bytes(&self) -> usize {
        self.info_bytes + self.item_bytes
    }
}

/// Stored conversations of one server.
pub struct ConversationStore {
    conversations: Mutex<ObjectLru<StoredConversation>>,
}

impl Default for ConversationStore {
    fn default() -> Self {
        Self { conversations: Mutex::new(ObjectLru::new(STORE_BYTES)) }
    }
}

impl ConversationStore {
    /// Stores an empty conversation.
    pub(super) fn create(&self, owner: CallerIdentity, id: &str, info: ConversationInfo) {
        let info_bytes = info.metadata.to_string().len();
        let (items, item_bytes, next) = (Vec::new(), 0, 0);
        let conversation = StoredConversation { owner, info, info_bytes, items, item_bytes, next };
        self.with(|store| store.put(id, conversation));
    }

    /// Returns the fields of a conversation; `None` if the caller has no such conversation.
    pub(super) fn info(&self, caller: CallerIdentity, id: &str) -> Option<ConversationInfo> {
        self.with(|store| store.touch(caller, id).map(|conversation| conversation.info.clone()))
    }

    /// Replaces the metadata of a conversation; returns whether the caller has such a conversation.
    pub(super) fn set_metadata(&self, caller: CallerIdentity, id: &str, metadata: Value) -> bool {
        let replaced = self.change(caller, id, |conversation| {
            conversation.info_bytes = metadata.to_string().len();
            conversation.info.metadata = metadata;
        });
        replaced.is_some()
    }

    /// Deletes a conversation; returns whether the caller had it.
    pub(super) fn remove(&self, caller: CallerIdentity, id: &str) -> bool {
        self.with(|store| store.take_owned(caller, id).is_some())
    }

    /// Returns the bytes of all items of a conversation; `None` if the caller has no such conversation.
    pub(crate) fn item_bytes(&self, caller: CallerIdentity, id: &str) -> Option<usize> {
        self.with(|store| store.touch(caller, id).map(|conversation| conversation.item_bytes))
    }

    /// Calls `read` with all items of a conversation; `None` if the caller has no such conversation.
    pub(crate) fn items<T>(
        &self,
        caller: CallerIdentity,
        id: &str,
        read: impl FnOnce(&[ConversationItem]) -> T,
    ) -> Option<T> {
        self.with(|store| store.touch(caller, id).map(|conversation| read(&conversation.items)))
    }

    /// Returns one item of a conversation.
    pub(crate) fn item(&self, caller: CallerIdentity, id: &str, item_id: &str) -> Option<String> {
        let find = |items: &[ConversationItem]| {
            items.iter().find(|item| item.id == item_id).map(|item| item.body.clone())
        };
        self.items(caller, id, find).flatten()
    }

    /// Deletes an item; returns whether the caller had it.
    pub(super) fn remove_item(&self, caller: CallerIdentity, id: &str, item_id: &str) -> bool {
        let removed = self.change(caller, id, |conversation| {
            let items = &mut conversation.items;
            let at = items.iter().position(|item| item.id == item_id)?;
            let item = items.remove(at);
            conversation.item_bytes -= item.stored_bytes();
            Some(())
        });
        removed.flatten().is_some()
    }

    /// Appends items; those without an id get one. Returns the appended items; `None` if the caller has no
    /// such conversation.
    pub(crate) fn append(
        &self,
        caller: CallerIdentity,
        id: &str,
        items: Vec<Value>,
    ) -> Option<Vec<ConversationItem>> {
        let hex = id.strip_prefix("conv_").unwrap_or(id);
        self.change(caller, id, |conversation| {
            let mut appended = Vec::with_capacity(items.len());
            for item in items {
                let item = ConversationItem::new(item, hex, &mut conversation.next);
                conversation.item_bytes += item.stored_bytes();
                conversation.items.push(item.clone());
                appended.push(item);
            }
            appended
        })
    }

    /// Removes the conversation, changes it, and stores it again. A conversation that exceeds the limit of
    /// the store is lost.
    fn change<T>(
        &self,
        caller: CallerIdentity,
        id: &str,
        change: impl FnOnce(&mut StoredConversation) -> T,
    ) -> Option<T> {
        self.with(|store| {
            let mut conversation = store.take_owned(caller, id)?;
            let result = change(&mut conversation);
            store.put(id, conversation);
            Some(result)
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut ObjectLru<StoredConversation>) -> T) -> T {
        work(&mut self.conversations.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ConversationItem {
    /// Creates an item from its JSON form. An item without an id gets the next one of the conversation or response,
    /// whose id contains `owner_hex`.
    pub(crate) fn new(mut item: Value, owner_hex: &str, next: &mut u64) -> Self {
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
            item["id"] = Value::from(format!("{prefix}_{owner_hex}_{next}"));
            *next += 1;
        }
        let id = item["id"].as_str().unwrap_or_default().to_owned();
        Self { id, body: item.to_string() }
    }

    /// Returns the bytes that the item takes in a store.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.id.len() + self.body.len() + ITEM_BYTES
    }
}

/// Checks that `items` may be appended to a conversation of `item_bytes` bytes. `field` is the field name in
/// errors.
pub(crate) fn check_size(item_bytes: usize, items: &[Value], field: &str) -> Result<(), ApiError> {
    let new: usize = items.iter().map(|item| item.to_string().len() + 2 * ITEM_BYTES).sum();
    if item_bytes + new <= CONVERSATION_BYTES_MAX {
        return Ok(());
    }
    let message = format!("the conversation exceeds {CONVERSATION_BYTES_MAX} bytes");
    Err(ApiError::invalid(field, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ANONYMOUS: CallerIdentity = CallerIdentity::ANONYMOUS;

    fn message(text: &str) -> Value {
        json!({"type": "message", "role": "user", "content": text})
    }

    fn store(id: &str) -> ConversationStore {
        let store = ConversationStore::default();
        store.create(ANONYMOUS, id, ConversationInfo { created: 1, metadata: json!({}) });
        store
    }

    #[test]
    fn items_get_ids_and_are_removed() {
        let store = store("conv_0a");
        let kept = json!({"type": "message", "id": "msg_0b_0"});
        let items = vec![message("x"), kept, json!({"type": "a_later_type"})];
        let appended = store.append(ANONYMOUS, "conv_0a", items).unwrap();
        let ids: Vec<&str> = appended.iter().map(|item| item.id.as_str()).collect();
        assert_eq!(ids, ["msg_0a_0", "msg_0b_0", "item_0a_1"]);
        let bytes = store.item_bytes(ANONYMOUS, "conv_0a").unwrap();
        assert!(store.remove_item(ANONYMOUS, "conv_0a", "msg_0a_0"));
        assert!(!store.remove_item(ANONYMOUS, "conv_0a", "msg_0a_0"));
        let left = store.item_bytes(ANONYMOUS, "conv_0a").unwrap();
        assert_eq!(bytes - left, appended[0].stored_bytes());
        // The id of a removed item is not used again.
        let again = store.append(ANONYMOUS, "conv_0a", vec![message("y")]).unwrap();
        assert_eq!(again[0].id, "msg_0a_2");
        assert!(store.append(ANONYMOUS, "conv_none", vec![message("y")]).is_none());
    }

    #[test]
    fn conversations_are_bounded_and_evicted() {
        let large = [message(&"x".repeat(CONVERSATION_BYTES_MAX))];
        let error = check_size(0, &large, "items").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("items"));
        assert!(check_size(CONVERSATION_BYTES_MAX, &[message("x")], "items").is_err());
        let store = store("conv_0");
        for index in 1..6 {
            let id = format!("conv_{index}");
            store.create(ANONYMOUS, &id, ConversationInfo { created: 1, metadata: json!({}) });
            let item = message(&"x".repeat(CONVERSATION_BYTES_MAX - 1024));
            store.append(ANONYMOUS, &id, vec![item]).unwrap();
        }
        assert!(
            store.info(ANONYMOUS, "conv_0").is_none() && store.info(ANONYMOUS, "conv_1").is_none()
        );
        assert!(store.info(ANONYMOUS, "conv_5").is_some());
    }
}
