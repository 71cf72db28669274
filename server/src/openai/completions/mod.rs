//! POST `/v1/completions`: text completions.

mod convert;
mod reply;
mod types;

use super::endpoint;
use crate::api_error::ApiError;
use crate::app::AppState;
use crate::openai::params::{FieldBounds, SamplingDefaults};
use crate::request_fields::RequestFields;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use reply::CompletionReply;
use std::sync::Arc;
use types::CompletionRequest;

/// Handles a text completion request.
pub async fn handle(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<CompletionReply>(app, request).await
}

/// Validates the fields of a text completion request.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub fn validate(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    defaults: &SamplingDefaults,
) -> Result<(), ApiError> {
    CompletionRequest::take(fields, bounds, defaults).map(|_| ())
}
