//! `/v1/responses`: OpenAI's Responses API over the chat path.
//!
//! Finished responses are kept for a while under a byte cap, so that the next request may continue them
//! (`previous_response_id`) and GET finds them.

mod background;
mod convert;
mod items;
mod reply;
mod store;
mod stream;
mod types;

pub use store::Store;

use super::app::App;
use super::error::ApiError;
use super::openai::exchange::{self, json_response, label};
use super::path::PathPart;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use reply::Reply;
use serde_json::json;
use std::sync::Arc;

/// Answers one request.
pub async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let prepared = exchange::prepare::<Reply>(&app, request).await?;
    let (request_id, ignored) = (prepared.request_id.clone(), prepared.ignored.clone());
    let mut response = if prepared.reply.is_background() {
        background::begin(prepared)?
    } else {
        exchange::answer(&app, prepared).await.map_err(|error| app.advise(error))?
    };
    label(&mut response, Some(&request_id), &ignored);
    Ok(response)
}

/// A kept response.
pub async fn find(
    State(app): State<Arc<App>>,
    PathPart(id): PathPart,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    app.responses
        .body(app.options.keys.caller(&headers), &id)
        .map(json_response)
        .ok_or_else(unknown)
}

/// Forgets a kept response.
pub async fn delete(
    State(app): State<Arc<App>>,
    PathPart(id): PathPart,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    if !app.responses.remove(app.options.keys.caller(&headers), &id) {
        return Err(unknown());
    }
    let body = json!({"id": id, "object": "response", "deleted": true});
    Ok(json_response(body.to_string()))
}

/// Ends a response that is made in the background.
pub async fn cancel(
    State(app): State<Arc<App>>,
    PathPart(id): PathPart,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let caller = app.options.keys.caller(&headers);
    app.responses.cancel(caller, &id).ok_or_else(unknown)??;
    app.responses.body(caller, &id).map(json_response).ok_or_else(unknown)
}

fn unknown() -> ApiError {
    let message = "no response of this id is kept: it was never stored, or had to make room";
    ApiError::new(StatusCode::NOT_FOUND, "unknown_response", message)
}
