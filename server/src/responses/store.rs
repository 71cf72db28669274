//! Store of responses. Responses in progress are never evicted. They cannot accumulate, because every
//! generation ends and admission control limits their number.

use super::response_items::ResponseItems;
use crate::api_error::ApiError;
use crate::auth::CallerIdentity;
use crate::object_lru::{ObjectLru, StoredObject};
use crate::template_value_json::TemplateValueJson;
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};
use text::mark_large_integers;
use tokio::task::AbortHandle;

/// Maximum size of all stored responses and their conversations, in bytes.
pub(super) const STORE_BYTES: usize = 64 << 20;

/// Store entry: one response and its conversation.
struct StoredResponse {
    /// Identity of the caller that created the response; the response is not visible to other callers.
    owner: CallerIdentity,
    /// JSON response object.
    body: String,
    /// Conversation up to and including the response, as a JSON list of chat template messages.
    history: String,
    items: Arc<ResponseItems>,
    /// Handle to abort the background task that generates the response; `None` if there is no such task.
    background_task: Option<AbortHandle>,
}

impl StoredObject for StoredResponse {
    fn owner(&self) -> CallerIdentity {
        self.owner
    }

    fn text_bytes(&self) -> usize {
        self.body.len() + self.history.len() + self.items.stored_bytes()
    }

    fn is_pinned(&self) -> bool {
        self.background_task.is_some()
    }
}

/// Data of a finished response that is stored.
pub(super) struct FinishedResponse {
    /// JSON response object.
    pub(super) body: String,
    /// Conversation up to and including the response, as a JSON list of chat template messages.
    pub(super) history: Value,
    pub(super) items: ResponseItems,
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
    /// Stores a response and evicts the least recently used ones. A response that by itself exceeds the byte
    /// limit is not stored.
    pub(super) fn put(&self, owner: CallerIdentity, id: &str, response: FinishedResponse) {
        let FinishedResponse { body, history, items } = response;
        let (history, items) = (history.to_string(), Arc::new(items));
        let entry = StoredResponse { owner, body, history, items, background_task: None };
        self.with(|store| store.put(id, entry));
    }

    /// Stores a response in progress; returns false if the response by itself exceeds the byte limit.
    pub(super) fn put_in_progress(
        &self,
        owner: CallerIdentity,
        id: &str,
        body: String,
        items: ResponseItems,
        background_task: AbortHandle,
    ) -> bool {
        let (history, background_task) = (String::new(), Some(background_task));
        let items = Arc::new(items);
        let entry = StoredResponse { owner, body, history, items, background_task };
        self.with(|store| store.put(id, entry))
    }

    /// Returns the items of a response and of its predecessors (`previous`), oldest first; empty if the
    /// caller has no such response. The chain ends at the first predecessor that is no longer stored.
    pub(super) fn items(&self, caller: CallerIdentity, id: &str) -> Vec<Arc<ResponseItems>> {
        self.with(|store| {
            let (mut chain, mut next) = (Vec::new(), Some(id.to_owned()));
            while let Some(entry) = next.take().and_then(|id| store.touch(caller, &id)) {
                next.clone_from(&entry.items.previous);
                chain.push(Arc::clone(&entry.items));
            }
            chain.reverse();
            chain
        })
    }

    /// Returns the item `item_id` of a response as JSON text.
    pub(super) fn item(&self, caller: CallerIdentity, id: &str, item_id: &str) -> Option<String> {
        let items = self.with(|store| Some(Arc::clone(&store.touch(caller, id)?.items)))?;
        items.item(item_id).map(|item| item.body.clone())
    }

    /// Returns the response object of a stored response as JSON text.
    pub fn body(&self, caller: CallerIdentity, id: &str) -> Option<String> {
        self.with(|store| store.touch(caller, id).map(|entry| entry.body.clone()))
    }

    /// Returns the conversation of a finished response, as a JSON list of chat template messages.
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

    /// Cancels a background response in progress; `None` if the caller has no response with this id.
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

    /// Replaces the response object of a response in progress, unless the response was cancelled or deleted.
    pub(super) fn update_in_progress(&self, id: &str, body: String) {
        self.with(|store| {
            if let Some(entry) = store.take_if(id, StoredResponse::is_pinned) {
                store.put(id, StoredResponse { body, ..entry });
            }
        });
    }

    /// Replaces a response in progress by its final form, unless the response was cancelled or deleted.
    pub(super) fn finish(&self, id: &str, response: FinishedResponse) {
        let FinishedResponse { body, history, items } = response;
        let (history, items) = (history.to_string(), Arc::new(items));
        self.with(|store| {
            if let Some(StoredResponse { owner, .. }) = store.take_if(id, StoredResponse::is_pinned)
            {
                let entry = StoredResponse { owner, body, history, items, background_task: None };
                store.put(id, entry);
            }
        });
    }

    fn with<T>(&self, work: impl FnOnce(&mut ObjectLru<StoredResponse>) -> T) -> T {
        work(&mut self.responses.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn status_of(body: &str) -> Option<String> {
    parsed(body)?["status"].as_str().map(str::to_owned)
}

/// Parses a response object; large integers keep all their digits.
fn parsed(body: &str) -> Option<Value> {
    serde_json::from_str(&mark_large_integers(body)).ok()
}

/// Returns the response object `body` with `status` replaced.
pub(super) fn with_status(body: &str, status: &str) -> String {
    let Some(mut value) = parsed(body) else { return body.to_owned() };
    value["status"] = Value::from(status);
    TemplateValueJson(&value).text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::responses::item_scope::ItemIdScope;
    use serde_json::json;

    const ANONYMOUS: CallerIdentity = CallerIdentity::ANONYMOUS;

    fn response(body: String) -> FinishedResponse {
        let history = json!([{"role": "user", "content": "hi"}]);
        FinishedResponse { body, history, items: ResponseItems::default() }
    }

    #[test]
    fn store_evicts_the_least_recently_used() {
        let store = ResponseStore::default();
        let third = "x".repeat(STORE_BYTES / 3 - 1024);
        for id in ["a", "b", "c"] {
            store.put(ANONYMOUS, id, response(third.clone()));
        }
        assert!(store.body(ANONYMOUS, "a").is_some());
        store.put(ANONYMOUS, "d", response(third));
        assert!(store.body(ANONYMOUS, "b").is_none(), "b was used least recently");
        assert!(store.body(ANONYMOUS, "a").is_some() && store.body(ANONYMOUS, "c").is_some());
        let history_of_a = store.history(ANONYMOUS, "a");
        assert_eq!(history_of_a, Some(response(String::new()).history.to_string()));
        store.put(ANONYMOUS, "e", response("x".repeat(STORE_BYTES)));
        assert!(store.body(ANONYMOUS, "e").is_none() && store.body(ANONYMOUS, "d").is_some());
        assert!(store.remove(ANONYMOUS, "d") && !store.remove(ANONYMOUS, "d"));
        assert_eq!(store.cancel(ANONYMOUS, "a").unwrap().unwrap_err().status, 400);
        assert!(store.cancel(ANONYMOUS, "unknown").is_none());
    }

    #[tokio::test]
    async fn cancelled_responses_keep_all_digits() {
        let store = ResponseStore::default();
        let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
        let number = "1".repeat(400);
        let body = format!("{{\"status\":\"in_progress\",\"tools\":[{{\"minimum\":{number}}}]}}");
        assert!(store.put_in_progress(ANONYMOUS, "a", body, ResponseItems::default(), task));
        for _ in 0..2 {
            store.cancel(ANONYMOUS, "a").unwrap().unwrap();
            let body = store.body(ANONYMOUS, "a").unwrap();
            assert!(body.contains(&number) && body.contains("\"cancelled\""), "{body}");
        }
    }

    #[tokio::test]
    async fn in_progress_responses_are_not_evicted() {
        let store = ResponseStore::default();
        let half = "x".repeat(STORE_BYTES / 2 - 1024);
        let items = ResponseItems::default;
        let task = || tokio::spawn(std::future::pending::<()>()).abort_handle();
        let (first, second) = (task(), task());
        assert!(store.put_in_progress(ANONYMOUS, "first", half.clone(), items(), first.clone()));
        for id in ["a", "b", "c"] {
            store.put(ANONYMOUS, id, response(half.clone()));
        }
        assert!(store.body(ANONYMOUS, "first").is_some() && store.body(ANONYMOUS, "b").is_none());
        store.finish("first", response(half.clone()));
        store.put(ANONYMOUS, "d", response(half.clone()));
        store.put(ANONYMOUS, "e", response(half.clone()));
        assert!(store.body(ANONYMOUS, "first").is_none(), "a finished response is evicted");
        assert!(!store.put_in_progress(
            ANONYMOUS,
            "large",
            "x".repeat(STORE_BYTES),
            items(),
            second
        ));
    }

    #[test]
    fn items_of_earlier_responses_come_first() {
        let store = ResponseStore::default();
        let put = |id: &str, previous: Option<&str>| {
            let input = vec![json!({"role": "user", "content": id})];
            let items = ResponseItems::of_input(
                previous.map(str::to_owned),
                input,
                &ItemIdScope::new(id, None),
            );
            let finished = FinishedResponse { items, ..response(String::new()) };
            store.put(ANONYMOUS, &format!("resp_{id}"), finished);
        };
        put("1", None);
        put("2", Some("resp_1"));
        put("3", Some("resp_2"));
        let ids = |id: &str| -> Vec<String> {
            let chain = store.items(ANONYMOUS, id);
            chain.iter().flat_map(|items| items.all()).map(|item| item.id.clone()).collect()
        };
        assert_eq!(ids("resp_3"), ["msg_1_0", "msg_2_0", "msg_3_0"]);
        let item = store.item(ANONYMOUS, "resp_2", "msg_2_0").unwrap();
        assert!(item.contains("input_text") && item.contains("msg_2_0"), "{item}");
        assert_eq!(store.item(ANONYMOUS, "resp_2", "msg_1_0"), None);
        assert!(store.remove(ANONYMOUS, "resp_1"));
        assert_eq!(ids("resp_3"), ["msg_2_0", "msg_3_0"]);
        assert!(ids("resp_1").is_empty());
    }
}
