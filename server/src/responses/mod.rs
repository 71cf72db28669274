//! `/v1/responses`: OpenAI's Responses API, implemented with the code of chat completions.
//!
//! Finished responses are kept in an LRU store with a byte limit. Later requests can continue a stored
//! response (`previous_response_id`), refer to its items (`item_reference`), and fetch it with GET.

mod background;
mod compaction;
mod convert;
mod developer_turns;
mod events;
mod hosted_tool_items;
mod item_scope;
mod items;
mod reply;
mod request_context;
mod response_items;
mod service_fields;
mod store;
mod stored_context;
mod stream;
mod text_format;
mod tool_choice;
mod tool_names;
mod tools;
mod truncation;
mod types;

pub(crate) use convert::input_items;
pub(crate) use store::ResponseStore;
pub(crate) use stored_context::StoredContextReader;
pub(crate) use types::take_metadata;

use super::api_error::ApiError;
use super::app::AppState;
use super::conversations::{ConversationItem, ItemPageQuery};
use super::openai::endpoint::{self, add_reply_headers, json_response};
use super::path_param::PathParam;
use super::query_parameters::ExtractedQuery;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use reply::ResponsesReplyFormatter;
use serde_json::json;
use std::sync::Arc;

/// Handles POST `/v1/responses`: creates a response.
pub(crate) async fn create(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let prepared = endpoint::prepare::<ResponsesReplyFormatter>(&app, request).await?;
    let (request_id, ignored) = (prepared.request_id.clone(), prepared.ignored.clone());
    let mut response = if prepared.reply.is_background() {
        background::start(prepared)?
    } else {
        endpoint::respond(&app, prepared).await.map_err(|error| app.complete_engine_error(error))?
    };
    add_reply_headers(&mut response, Some(&request_id), &ignored);
    Ok(response)
}

/// Handles GET: returns a stored response.
pub(crate) async fn retrieve(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    app.responses
        .body(app.options.api_keys.caller(&headers), &id)
        .map(json_response)
        .ok_or_else(not_found)
}

/// Handles GET of input items: returns a page of the input items of a stored response.
pub(crate) async fn list_input_items(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    query: ExtractedQuery,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let query = ItemPageQuery::of_request(query)?;
    let chain = app.responses.items(app.options.api_keys.caller(&headers), &id);
    let (response, earlier) = chain.split_last().ok_or_else(not_found)?;
    let earlier = earlier.iter().flat_map(|items| items.all());
    let items: Vec<&ConversationItem> = earlier.chain(response.input.iter()).collect();
    query.page(&items).map(json_response)
}

/// Handles DELETE: deletes a stored response.
pub(crate) async fn delete(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    if !app.responses.remove(app.options.api_keys.caller(&headers), &id) {
        return Err(not_found());
    }
    let body = json!({"id": id, "object": "response", "deleted": true});
    Ok(json_response(body.to_string()))
}

/// Handles the cancellation request for a background response.
pub(crate) async fn cancel(
    State(app): State<Arc<AppState>>,
    PathParam(id): PathParam,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.api_keys.caller(&headers);
    app.responses.cancel(caller, &id).ok_or_else(not_found)??;
    app.responses.body(caller, &id).map(json_response).ok_or_else(not_found)
}

fn not_found() -> ApiError {
    let message = "no response with this id is stored: it was never stored, or was evicted";
    ApiError::new(StatusCode::NOT_FOUND, "unknown_response", message)
}
