//! Store of responses. Responses in progress are never evicted: their generation ends in any case, and
//! admission limits their number.

use crate::api_error::ApiError;
use crate::auth::CallerIdentity;
use crate::object_lru::{ObjectLru, StoredObject};
use serde_json::Value;
use std::sync::{Mutex, PoisonError};
use tokio::task::AbortHandle;

/// Maximum size of all stored responses and their conversations, in bytes.
pub(super) const STORE_BYTES: usize = 64 << 20;

/// Entry of the store: one response and its conversation.
struct StoredResponse {
    /// Identity of the caller that created the response; it is visible to no other caller.
    owner: CallerIdentity,
    /// JSON response object.
    body: String,
    /// Conversation up to and including the response, as a JSON list of template messages.
    history: String,
    /// Handle to abort the background task that generates the response, if there is one.
    background_task: Option<AbortHandle>,
}

impl StoredObject for StoredResponse {
    fn owner(&self) -> CallerIdentity {
        self.owner
    }

    fn text_bytes(&self) -> usize {
        self.body.len() + self.history.len()
    }

    fn is_pinned(&self) -> bool {
        self.background_task.is_some()
    }
}

/// Stored responses of one server.
pub struct ResponseStore {
    responses: Mutex<ObjectLru<StoredResponse>>,
}

impl Default for ResponseStore {
    fn default() -> Self {
        Self { responses: Mutex::new(ObjectLru::new(STORE_BYTES)) }
    }
}

impl ResponseStore {
    /// Stores a response and evicts the least recently used ones. A response that exceeds the limit alone is
    /// not stored.
    pub fn put(&self, owner: CallerIdentity, id: &str, body: String, history: &Value) {
        let (history, background_task) = (history.to_string(), None);
        self.with(|store| store.put(id, StoredResponse { owner, body, history, background_task }));
    }

    /// Stores a response in progress; returns false if it exceeds the limit alone.
    pub(super) fn put_in_progress(
        &self,
        owner: CallerIdentity,
        id: &str,
        body: String,
        background_task: AbortHandle,
    ) -> bool {
        let (history, background_task) = (String::new(), Some(background_task));
        self.with(|store| store.put(id, StoredResponse { owner, body, history, background_task }))
    }

    /// Returns the response object of a stored response as JSON text.
    pub fn body(&self, caller: CallerIdentity, id: &str) -> Option<String> {
        self.with(|store| store.touch(caller, id).map(|entry| entry.body.clone()))
    }

    /// Returns the conversation of a finished response, as a JSON list of template messages.
    pub fn history(&self, caller: CallerIdentity, id: &str) -> Option<String> {
        let text = self.with(|store| store.touch(caller, id).map(|entry| entry.history.clone()))?;
        Some(text).filter(|text| !text.is_empty())
    }

    /// Deletes a response; aborts its generation if it is in progress.
    pub fn remove(&self, caller: CallerIdentity, id: &str) -> bool {
        self.with(|store| match store.take_owned(caller, id) {
            None => false,
            Some(entry) => {
                entry.background_task.inspect(AbortHandle::abort);
                true
            }
        })
    }

    /// Cancels a response in progress; `None` = no response with this id is visible to the caller.
    ///
    /// Errors: HTTP status 400 if the response is finished, or is not a background response.
    pub fn cancel(&self, caller: CallerIdentity, id: &str) -> Option<Result<(), ApiError>> {
        self.with(|store| {
            let mut entry = store.take_owned(caller, id)?;
            let result = match entry.background_task.take() {
                None if status_of(&entry.body).as_deref() == Some("cancelled") => Ok(()),
                None => {
                    let message = "only background responses can be cancelled";
                    Err(ApiError::bad_request("invalid_value", "response_id", message))
                }
                Some(background_task) => {
                    background_task.abort();
                    entry.body = with_status(&entry.body, "cancelled");
                    Ok(())
                }
            };
            store.put(id, entry);
            Some(result)
        })
    }

    /// Replaces the response object of a response in progress, once it has output.
    pub(super) fn update_in_progress(&self, id: &str, body: String) {
        self.with(|store| {
            if let Some(entry) = store.take_if(id, StoredResponse::is_pinned) {
                store.put(id, StoredResponse { body, ..entry });
            }
        });
    }

    /// Replaces a response in progress by its final form, unless it was cancelled or deleted in the meantime.
    pub(super) fn finish(&self, id: &str, body: String, history: &Value) {
        let history = history.to_string();
        self.with(|store| {
            if let Some(entry) = store.take_if(id, StoredResponse::is_pinned) {
                store.put(id, StoredResponse { body, history, background_task: None, ..entry });
            }
        });
    }

    fn with<T>(&self, work: impl FnOnce(&mut ObjectLru<StoredResponse>) -> T) -> T {
        work(&mut self.responses.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn status_of(body: &str) -> Option<String> {
    let value: Value = serde_json::from_str(body).ok()?;
    value["status"].as_str().map(str::to_owned)
}

/// Returns the response object `body` with another `status`.
pub(super) fn with_status(body: &str, status: &str) -> String {
    let mut value: Value = serde_json::from_str(body).unwrap_or_default();
    value["status"] = Value::from(status);
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ANONYMOUS: CallerIdentity = CallerIdentity::ANONYMOUS;

    #[test]
    fn store_evicts_the_least_recently_used() {
        let store = ResponseStore::default();
        let history = json!([{"role": "user", "content": "hi"}]);
        let third = "x".repeat(STORE_BYTES / 3 - 1024);
        for id in ["a", "b", "c"] {
            store.put(ANONYMOUS, id, third.clone(), &history);
        }
        assert!(store.body(ANONYMOUS, "a").is_some());
        store.put(ANONYMOUS, "d", third, &history);
        assert!(store.body(ANONYMOUS, "b").is_none(), "b was used least recently");
        assert!(store.body(ANONYMOUS, "a").is_some() && store.body(ANONYMOUS, "c").is_some());
        let history_of_a = store.history(ANONYMOUS, "a");
        assert_eq!(history_of_a, Some(history.to_string()));
        store.put(ANONYMOUS, "e", "x".repeat(STORE_BYTES), &history);
        assert!(store.body(ANONYMOUS, "e").is_none() && store.body(ANONYMOUS, "d").is_some());
        assert!(store.remove(ANONYMOUS, "d") && !store.remove(ANONYMOUS, "d"));
        assert_eq!(store.cancel(ANONYMOUS, "a").unwrap().unwrap_err().status, 400);
        assert!(store.cancel(ANONYMOUS, "unknown").is_none());
    }

    #[tokio::test]
    async fn in_progress_responses_are_not_evicted() {
        let store = ResponseStore::default();
        let (history, half) = (json!([]), "x".repeat(STORE_BYTES / 2 - 1024));
        let task = || tokio::spawn(std::future::pending::<()>()).abort_handle();
        let (first, second) = (task(), task());
        assert!(store.put_in_progress(ANONYMOUS, "first", half.clone(), first.clone()));
        for id in ["a", "b", "c"] {
            store.put(ANONYMOUS, id, half.clone(), &history);
        }
        assert!(store.body(ANONYMOUS, "first").is_some() && store.body(ANONYMOUS, "b").is_none());
        store.finish("first", half.clone(), &history);
        store.put(ANONYMOUS, "d", half.clone(), &history);
        store.put(ANONYMOUS, "e", half.clone(), &history);
        assert!(store.body(ANONYMOUS, "first").is_none(), "a finished response is evicted");
        assert!(!store.put_in_progress(ANONYMOUS, "large", "x".repeat(STORE_BYTES), second));
    }
}
