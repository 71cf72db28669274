//! POST `/v1/completions`.

mod convert;
mod reply;
mod types;

use super::exchange;
use crate::server::app::App;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::params::{Bounds, Defaults};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use reply::Reply;
use std::sync::Arc;
use types::CompletionRequest;

/// Answers one request.
pub async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    exchange::serve::<Reply>(app, request).await
}

/// Whether a body would be taken, as far as its fields alone decide.
///
/// Errors: 400 naming the field.
pub fn check(fields: &mut Fields, bounds: &Bounds, defaults: &Defaults) -> Result<(), ApiError> {
    CompletionRequest::take(fields, bounds, defaults).map(|_| ())
}
