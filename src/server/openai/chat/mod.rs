//! POST `/v1/chat/completions`.

mod convert;
pub(crate) use convert::render;
pub mod messages;
mod reply;
mod types;

use super::exchange;
use crate::server::app::App;
use crate::server::error::ApiError;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use reply::Reply;
use std::sync::Arc;

/// Answers one request.
pub async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    exchange::serve::<Reply>(app, request).await
}
