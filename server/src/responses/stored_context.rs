//! Reads the stored responses and conversations that a request continues or refers to. The memory for reading
//! is reserved first, because a short request can name long objects.

use super::item_scope::object_hexes_of;
use crate::api_error::ApiError;
use crate::app::AppState;
use crate::auth::CallerIdentity;
use crate::openai::memory_reservation::reserve;
use crate::strict_json::JsonValue;
use axum::http::StatusCode;
use engine::AdmissionPermit;
use serde_json::Value;

/// Bytes of memory reserved per byte of stored text: for the text, its parsed values, and the prompt.
const COPIES: u64 = 4;

/// Items of a stored conversation.
pub(super) struct StoredConversationItems {
    pub(super) items: Vec<JsonValue>,
    /// Number of bytes that the conversation occupies in its store.
    pub(super) bytes: usize,
}

/// Reads stored responses and conversations of the caller that one request names.
pub(crate) struct StoredContextReader<'a> {
    app: &'a AppState,
    caller: CallerIdentity,
    permit: &'a mut AdmissionPermit,
}

impl<'a> StoredContextReader<'a> {
    /// Creates the reader for a request of `caller`; memory is reserved through `permit`.
    pub(crate) fn new(
        app: &'a AppState,
        caller: CallerIdentity,
        permit: &'a mut AdmissionPermit,
    ) -> Self {
        Self { app, caller, permit }
    }

    /// Returns the conversation of the response `id`, as chat template messages; `field` is the field name in
    /// errors.
    ///
    /// Errors: HTTP status 404 if the response is not stored; 400, 429 or 503 if the memory budget does not
    /// suffice.
    pub(super) fn history(&mut self, id: &str, field: &str) -> Result<Vec<Value>, ApiError> {
        let text = self.app.responses.history(self.caller, id);
        let text = text.ok_or_else(|| not_stored("unknown_response", "response", id, field))?;
        self.reserve(text.len(), field)?;
        serde_json::from_str(&text).map_err(|_| ApiError::internal())
    }

    /// Returns the stored item `id`; `field` is the field name in errors.
    ///
    /// Errors: HTTP status 404 if the item is not stored; 400, 429 or 503 if the memory budget does not
    /// suffice.
    pub(super) fn item(&mut self, id: &str, field: &str) -> Result<JsonValue, ApiError> {
        let item = object_hexes_of(id).into_iter().find_map(|hex| {
            let item = self.app.responses.item(self.caller, &format!("resp_{hex}"), id);
            item.or_else(|| self.app.conversations.item(self.caller, &format!("conv_{hex}"), id))
        });
        let item = item.ok_or_else(|| not_stored("unknown_item", "item", id, field))?;
        self.reserve(item.len(), field)?;
        JsonValue::parse(item.as_bytes()).map_err(|_| ApiError::internal())
    }

    /// Returns the items of the conversation `id`; `field` is the field name in errors.
    ///
    /// Errors: HTTP status 404 if the conversation is not stored; 400, 429 or 503 if the memory budget does
    /// not suffice.
    pub(super) fn conversation(
        &mut self,
        id: &str,
        field: &str,
    ) -> Result<StoredConversationItems, ApiError> {
        let unknown = || not_stored("unknown_conversation", "conversation", id, field);
        let conversations = &self.app.conversations;
        let bytes = conversations.item_bytes(self.caller, id).ok_or_else(unknown)?;
        self.reserve(bytes, field)?;
        let bodies = self.app.conversations.items(self.caller, id, |items| {
            items.iter().map(|item| item.body.clone()).collect::<Vec<_>>()
        });
        let items = bodies
            .ok_or_else(unknown)?
            .into_iter()
            .map(|body| JsonValue::parse(body.as_bytes()).map_err(|_| ApiError::internal()));
        Ok(StoredConversationItems { items: items.collect::<Result<_, _>>()?, bytes })
    }

    fn reserve(&mut self, bytes: usize, field: &str) -> Result<(), ApiError> {
        reserve(self.app, self.permit, COPIES * bytes as u64, field)
    }
}

/// Creates the 404 error: the object with the id `id` in the field `field` is not stored.
fn not_stored(reason: &'static str, object: &str, id: &str, field: &str) -> ApiError {
    const ID_SHOWN: usize = 128;
    let shown: String = id.chars().take(ID_SHOWN).collect();
    let message = format!(
        "no {object} with the id {shown:?} is stored: it was never stored, or was deleted or evicted"
    );
    let error = ApiError::new(StatusCode::NOT_FOUND, reason, message);
    ApiError { param: Some(field.to_owned()), ..error }
}
