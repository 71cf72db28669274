//! Responses that are kept: the last used ones, under a cap in bytes, each for the key that made it.
//!
//! What is being made never makes room for others: it ends by itself, and admission bounds how much of it
//! there is.

use crate::server::error::ApiError;
use crate::server::keys::Caller;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use tokio::task::AbortHandle;

/// Bytes of all kept responses and their conversations.
pub(super) const STORE_BYTES: usize = 64 << 20;
/// Bytes that an entry takes besides its texts.
const ENTRY_BYTES: usize = 256;

/// A response as it is kept.
struct Entry {
    /// Who finds it.
    owner: Caller,
    /// The JSON object.
    body: String,
    /// The conversation up to and with it, as a JSON list of messages of the template.
    history: String,
    /// Ends its making, if that goes on in the background.
    making: Option<AbortHandle>,
    /// When it was last used, on the shelf's own clock.
    used: u64,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.body.len() + self.history.len() + ENTRY_BYTES
    }
}

#[derive(Default)]
struct Shelf {
    entries: HashMap<String, Entry>,
    by_use: BTreeMap<u64, String>,
    bytes: usize,
    clock: u64,
}

/// The kept responses of one server.
#[derive(Default)]
pub struct Store {
    shelf: Mutex<Shelf>,
}

impl Store {
    /// Keeps a response. What was used least recently makes room; an entry above the cap is not kept.
    pub fn put(&self, owner: Caller, id: &str, body: String, history: &Value) {
        let (history, making, used) = (history.to_string(), None, 0);
        self.with(|shelf| shelf.put(id, Entry { owner, body, history, making, used }));
    }

    /// Keeps a response that is being made; false if it is above the cap.
    pub(super) fn put_making(
        &self,
        owner: Caller,
        id: &str,
        body: String,
        making: AbortHandle,
    ) -> bool {
        let (history, used) = (String::new(), 0);
        self.with(|shelf| shelf.put(id, Entry { owner, body, history, making: Some(making), used }))
    }

    /// The JSON object of a kept response.
    pub fn body(&self, caller: Caller, id: &str) -> Option<String> {
        self.with(|shelf| shelf.touch(caller, id).map(|entry| entry.body.clone()))
    }

    /// The messages of a finished response's conversation.
    pub fn history(&self, caller: Caller, id: &str) -> Option<Vec<Value>> {
        let text = self.with(|shelf| shelf.touch(caller, id).map(|entry| entry.history.clone()))?;
        serde_json::from_str(&text).ok()
    }

    /// Forgets a response; what is being made ends.
    pub fn remove(&self, caller: Caller, id: &str) -> bool {
        self.with(|shelf| match shelf.take_of(caller, id) {
            None => false,
            Some(entry) => {
                entry.making.inspect(AbortHandle::abort);
                true
            }
        })
    }

    /// Ends a response that is being made; `None` = there is none of this id.
    ///
    /// Errors: 400 if it is made already, or not in the background.
    pub fn cancel(&self, caller: Caller, id: &str) -> Option<Result<(), ApiError>> {
        self.with(|shelf| {
            let mut entry = shelf.take_of(caller, id)?;
            let result = match entry.making.take() {
                None if status_of(&entry.body).as_deref() == Some("cancelled") => Ok(()),
                None => {
                    let message = "only a response that is made in the background can be cancelled";
                    Err(ApiError::bad_request("invalid_value", "response_id", message))
                }
                Some(making) => {
                    making.abort();
                    entry.body = with_status(&entry.body, "cancelled");
                    Ok(())
                }
            };
            shelf.put(id, entry);
            Some(result)
        })
    }

    /// The first output of a response that is being made is there.
    pub(super) fn progress(&self, id: &str, body: String) {
        self.with(|shelf| {
            if let Some(entry) = shelf.take_making(id) {
                shelf.put(id, Entry { body, ..entry });
            }
        });
    }

    /// Replaces a response that was being made, unless it has been cancelled or forgotten meanwhile.
    pub(super) fn finish(&self, id: &str, body: String, history: &Value) {
        let history = history.to_string();
        self.with(|shelf| {
            if let Some(entry) = shelf.take_making(id) {
                shelf.put(id, Entry { body, history, making: None, ..entry });
            }
        });
    }

    fn with<T>(&self, work: impl FnOnce(&mut Shelf) -> T) -> T {
        work(&mut self.shelf.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn status_of(body: &str) -> Option<String> {
    let value: Value = serde_json::from_str(body).ok()?;
    value["status"].as_str().map(str::to_owned)
}

/// The same response in another state.
pub(super) fn with_status(body: &str, status: &str) -> String {
    let mut value: Value = serde_json::from_str(body).unwrap_or_default();
    value["status"] = Value::from(status);
    value.to_string()
}

impl Shelf {
    fn touch(&mut self, caller: Caller, id: &str) -> Option<&Entry> {
        let entry = self.take_of(caller, id)?;
        self.put(id, entry);
        self.entries.get(id)
    }

    /// Takes what belongs to the caller. Whose id it is otherwise, nobody is told.
    fn take_of(&mut self, caller: Caller, id: &str) -> Option<Entry> {
        self.entries.get(id).filter(|entry| entry.owner == caller)?;
        self.take(id)
    }

    fn take_making(&mut self, id: &str) -> Option<Entry> {
        self.entries.get(id).filter(|entry| entry.making.is_some())?;
        self.take(id)
    }

    fn take(&mut self, id: &str) -> Option<Entry> {
        let entry = self.entries.remove(id)?;
        self.by_use.remove(&entry.used);
        self.bytes -= entry.bytes();
        Some(entry)
    }

    /// False if the entry is too large to be kept.
    fn put(&mut self, id: &str, mut entry: Entry) -> bool {
        self.take(id);
        if entry.bytes() > STORE_BYTES {
            return false;
        }
        self.clock += 1;
        entry.used = self.clock;
        self.bytes += entry.bytes();
        self.by_use.insert(self.clock, id.to_owned());
        self.entries.insert(id.to_owned(), entry);
        while self.bytes > STORE_BYTES {
            let is_made = |id: &&String| self.entries.get(*id).is_some_and(|e| e.making.is_none());
            let mut others = self.by_use.values().filter(|other| *other != id);
            let Some(oldest) = others.find(is_made).cloned() else { break };
            self.take(&oldest);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ANYONE: Caller = Caller::ANYONE;

    #[test]
    fn what_was_used_least_makes_room() {
        let store = Store::default();
        let history = json!([{"role": "user", "content": "hi"}]);
        let third = "x".repeat(STORE_BYTES / 3 - 1024);
        for id in ["a", "b", "c"] {
            store.put(ANYONE, id, third.clone(), &history);
        }
        assert!(store.body(ANYONE, "a").is_some());
        store.put(ANYONE, "d", third, &history);
        assert!(store.body(ANYONE, "b").is_none(), "b was used least recently");
        assert!(store.body(ANYONE, "a").is_some() && store.body(ANYONE, "c").is_some());
        let kept = store.history(ANYONE, "a");
        assert_eq!(kept, Some(vec![json!({"role": "user", "content": "hi"})]));
        store.put(ANYONE, "e", "x".repeat(STORE_BYTES), &history);
        assert!(store.body(ANYONE, "e").is_none() && store.body(ANYONE, "d").is_some());
        assert!(store.remove(ANYONE, "d") && !store.remove(ANYONE, "d"));
        assert_eq!(store.cancel(ANYONE, "a").unwrap().unwrap_err().status, 400);
        assert!(store.cancel(ANYONE, "nobody").is_none());
    }

    #[tokio::test]
    async fn what_is_being_made_stays() {
        let store = Store::default();
        let (history, half) = (json!([]), "x".repeat(STORE_BYTES / 2 - 1024));
        let task = || tokio::spawn(std::future::pending::<()>()).abort_handle();
        let (first, second) = (task(), task());
        assert!(store.put_making(ANYONE, "first", half.clone(), first.clone()));
        for id in ["a", "b", "c"] {
            store.put(ANYONE, id, half.clone(), &history);
        }
        assert!(store.body(ANYONE, "first").is_some() && store.body(ANYONE, "b").is_none());
        store.finish("first", half.clone(), &history);
        store.put(ANYONE, "d", half.clone(), &history);
        store.put(ANYONE, "e", half.clone(), &history);
        assert!(store.body(ANYONE, "first").is_none(), "what has been made makes room");
        assert!(!store.put_making(ANYONE, "large", "x".repeat(STORE_BYTES), second));
    }
}
