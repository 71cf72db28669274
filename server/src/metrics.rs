//! `/metrics`: all metrics in the Prometheus text format.

use super::api_error::ApiError;
use super::app::AppState;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Response, header};
use std::sync::Arc;

/// Returns the current metrics; a HEAD request gets only their content length.
pub(crate) async fn page(State(app): State<Arc<AppState>>) -> Result<Response<Body>, ApiError> {
    let serving = app.serving()?;
    let page = serving.metrics.render(&serving.client.replica_stats()).map_err(|error| {
        tracing::error!(%error, "the metrics cannot be rendered");
        ApiError::internal()
    })?;
    let mut response = Response::new(Body::from(page));
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, text);
    Ok(response)
}
