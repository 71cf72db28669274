//! `/v1/conversations`: OpenAI's Conversations API. Conversations are kept in an LRU store with a byte limit.
//! Requests to `/v1/responses` continue a conversation with the field `conversation`.

mod item_sequence;
mod items;
mod store;

pub(crate) use item_sequence::ConversationItem;
pub(crate) use items::{ItemPageQuery, stored_form, user_message};
pub(crate) use store::{ConversationStore, check_size};

use super::api_error::ApiError;
use super::app::AppState;
use super::auth::CallerIdentity;
use super::openai::endpoint::{json_response, unix_time};
use super::path_param::{ItemPathParams, PathParam};
use super::query_parameters::ExtractedQuery;
use super::responses::{StoredContextReader, input_items, take_metadata};
use super::strict_json::JsonValue;
use super::tokenize;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use engine::AdmissionPermit;
use items::list;
use serde_json::{Value, json};
use std::sync::Arc;
use store::ConversationInfo;

/// Handles POST `/v1/conversations`: creates a conversation.
pub(crate) async fn create(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.api_keys.caller(request.headers());
    tokenize::serve(app, request, move |app, _, fields, mut permit| {
        let metadata = take_metadata(fields)?;
        let items = match fields.take("items") {
            None => Vec::new(),
            Some(items) => checked_items(app, caller, items, &mut permit)?,
        };
        check_size(0, &items, "items")?;
        let id = format!("conv_{}", app.id_generator.id());
        let info = ConversationInfo { created: unix_time(), metadata };
        app.conversations.create(caller, &id, info.clone());
        app.conversations.append(caller, &id, items);
        Ok(Body::from(conversation_body(&id, &info)))
    })
    .await
}

/// Handles GET: returns a conversation.
pub(crate) async fn retrieve(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.api_keys.caller(&headers);
    let info = app.conversations.info(caller, &id).ok_or_else(not_found)?;
    Ok(json_response(conversation_body(&id, &info)))
}

/// Handles POST: replaces the metadata of a conversation.
pub(crate) async fn update(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.api_keys.caller(request.headers());
    tokenize::serve(app, request, move |app, _, fields, _| {
        let metadata = take_metadata(fields)?;
        if !app.conversations.set_metadata(caller, &id, metadata) {
            return Err(not_found());
        }
        let info = app.conversations.info(caller, &id).ok_or_else(not_found)?;
        Ok(Body::from(conversation_body(&id, &info)))
    })
    .await
}

/// Handles DELETE: deletes a conversation and its items.
pub(crate) async fn delete(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    if !app.conversations.remove(app.options.api_keys.caller(&headers), &id) {
        return Err(not_found());
    }
    let body = json!({"id": id, "object": "conversation.deleted", "deleted": true});
    Ok(json_response(body.to_string()))
}

/// Handles POST of items: appends them to a conversation.
pub(crate) async fn create_items(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.api_keys.caller(request.headers());
    tokenize::serve(app, request, move |app, _, fields, mut permit| {
        let items = checked_items(app, caller, fields.required("items")?, &mut permit)?;
        let bytes = app.conversations.item_bytes(caller, &id).ok_or_else(not_found)?;
        check_size(bytes, &items, "items")?;
        let appended = app.conversations.append(caller, &id, items).ok_or_else(not_found)?;
        let appended: Vec<&ConversationItem> = appended.iter().collect();
        Ok(Body::from(list(&appended, false)))
    })
    .await
}

/// Handles GET of items: returns a page of the items.
pub(crate) async fn list_items(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    query: ExtractedQuery,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let query = ItemPageQuery::of_request(query)?;
    let caller = app.options.api_keys.caller(&headers);
    let page =
        app.conversations.items(caller, &id, |items| query.page(&items.iter().collect::<Vec<_>>()));
    page.ok_or_else(not_found)?.map(json_response)
}

/// Handles GET of one item.
pub(crate) async fn retrieve_item(
    State(app): State<Arc<AppState>>,
    ItemPathParams { id, item_id }: ItemPathParams,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.api_keys.caller(&headers);
    let item = app.conversations.item(caller, &id, &item_id);
    item.map(json_response).ok_or_else(item_not_found)
}

/// Handles DELETE of one item; returns the conversation.
pub(crate) async fn delete_item(
    State(app): State<Arc<AppState>>,
    ItemPathParams { id, item_id }: ItemPathParams,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.api_keys.caller(&headers);
    let info = app.conversations.info(caller, &id).ok_or_else(not_found)?;
    if !app.conversations.remove_item(caller, &id, &item_id) {
        return Err(item_not_found());
    }
    Ok(json_response(conversation_body(&id, &info)))
}

/// Validates items like the input of a `/v1/responses` request; returns the items in their stored form.
fn checked_items(
    app: &AppState,
    caller: CallerIdentity,
    items: JsonValue,
    permit: &mut AdmissionPermit,
) -> Result<Vec<Value>, ApiError> {
    let mut stored = StoredContextReader::new(app, caller, permit);
    Ok(input_items(items, "items", &mut stored)?.into_iter().map(stored_form).collect())
}

fn conversation_body(id: &str, info: &ConversationInfo) -> String {
    let ConversationInfo { created, metadata } = info;
    let body =
        json!({"id": id, "object": "conversation", "created_at": created, "metadata": metadata});
    body.to_string()
}

fn not_found() -> ApiError {
    let message =
        "no conversation with this id is stored: it was never stored, or was deleted or evicted";
    ApiError::new(StatusCode::NOT_FOUND, "unknown_conversation", message)
}

fn item_not_found() -> ApiError {
    let message = "the conversation has no item with this id, or is not stored";
    ApiError::new(StatusCode::NOT_FOUND, "unknown_item", message)
}
