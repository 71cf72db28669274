//! Store of conversations and their items.

use super::item_sequence::{ConversationItem, ITEM_BYTES, ItemSequence};
use crate::api_error::ApiError;
use crate::auth::CallerIdentity;
use crate::object_lru::{ObjectLru, StoredObject};
use crate::template_value_json::TemplateValueJson;
use serde_json::Value;
use std::sync::{Mutex, PoisonError};

/// Maximum size of all stored conversations, in bytes.
const STORE_BYTES: usize = 64 << 20;
/// Maximum size of one conversation that a request may extend, in bytes.
const CONVERSATION_BYTES_MAX: usize = 16 << 20;

/// Fields of a conversation other than its items.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ConversationInfo {
    /// Creation time: Unix time in seconds.
    pub(crate) created: u64,
    pub(crate) metadata: Value,
}

/// Conversation of one caller; it is not visible to other callers.
struct StoredConversation {
    owner: CallerIdentity,
    info: ConversationInfo,
    /// Number of bytes of the conversation's metadata.
    info_bytes: usize,
    items: ItemSequence,
    /// Number used in the id of the next item that is added without an id.
    next: u64,
}

impl StoredObject for StoredConversation {
    fn owner(&self) -> CallerIdentity {
        self.owner
    }

    fn text_bytes(&self) -> usize {
        self.info_bytes + self.items.stored_bytes()
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
        let items = ItemSequence::default();
        let conversation = StoredConversation { owner, info, info_bytes, items, next: 0 };
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

    /// Deletes a conversation; returns whether it existed and belonged to the caller.
    pub(super) fn remove(&self, caller: CallerIdentity, id: &str) -> bool {
        self.with(|store| store.take_owned(caller, id).is_some())
    }

    /// Returns the bytes of all items of a conversation; `None` if the caller has no such conversation.
    pub(crate) fn item_bytes(&self, caller: CallerIdentity, id: &str) -> Option<usize> {
        self.with(|store| {
            store.touch(caller, id).map(|conversation| conversation.items.stored_bytes())
        })
    }

    /// Calls `read` with all items of a conversation and returns its result; `None` if the caller has no
    /// such conversation.
    pub(crate) fn items<T>(
        &self,
        caller: CallerIdentity,
        id: &str,
        read: impl FnOnce(&ItemSequence) -> T,
    ) -> Option<T> {
        self.with(|store| store.touch(caller, id).map(|conversation| read(&conversation.items)))
    }

    /// Returns an item of a conversation as JSON text; `None` if the caller has no such item.
    pub(crate) fn item(&self, caller: CallerIdentity, id: &str, item_id: &str) -> Option<String> {
        let find = |items: &ItemSequence| items.get(item_id).map(|item| item.body.clone());
        self.items(caller, id, find).flatten()
    }

    /// Deletes an item; returns whether it existed in a conversation of the caller.
    pub(super) fn remove_item(&self, caller: CallerIdentity, id: &str, item_id: &str) -> bool {
        let removed = self.change(caller, id, |conversation| conversation.items.remove(item_id));
        removed == Some(true)
    }

    /// Appends JSON objects as items; an item without an id gets a new id. Returns the appended items;
    /// `None` if the caller has no such conversation.
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
                conversation.items.push(item.clone());
                appended.push(item);
            }
            appended
        })
    }

    /// Appends items that have ids; returns whether the caller has such a conversation.
    pub(crate) fn extend<'a>(
        &self,
        caller: CallerIdentity,
        id: &str,
        items: impl Iterator<Item = &'a ConversationItem>,
    ) -> bool {
        let extended = self.change(caller, id, |conversation| {
            items.cloned().for_each(|item| conversation.items.push(item));
        });
        extended.is_some()
    }

    /// Applies `change` to a conversation by removing it and storing it again. A conversation that exceeds
    /// the limit of the store is lost.
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

/// Checks that `items` may be appended to a conversation of `item_bytes` bytes. `field` is the field name in
/// errors.
pub(crate) fn check_size(item_bytes: usize, items: &[Value], field: &str) -> Result<(), ApiError> {
    let new: usize =
        items.iter().map(|item| TemplateValueJson(item).text().len() + 2 * ITEM_BYTES).sum();
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
        // The id of a removed item is not reused.
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
