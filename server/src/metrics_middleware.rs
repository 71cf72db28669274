//! Middleware that counts replies by route and status, rejections by reason, and streams in progress; it
//! also logs rejections.

use super::api_error::ApiError;
use super::app::AppState;
use super::guarded_body::guarded;
use super::routes::PROBE_PATHS;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Response, header};
use axum::middleware::Next;
use std::sync::Arc;

/// Route label of requests that match no route. The request path is not used as a label, because clients
/// choose it freely.
const NO_ROUTE: &str = "unknown";

/// Handles the request and counts its reply. Before the model is loaded, only rejections are counted.
pub(crate) async fn count_requests(
    State(app): State<Arc<AppState>>,
    route: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
    let error = response.extensions().get::<ApiError>();
    if let Some(error) = error {
        app.rejections.log(route, error);
    }
    let reason = error.filter(|_| !PROBE_PATHS.contains(&route)).map(|error| error.reason);
    if reason == Some("starting") {
        app.count_startup_rejection();
        return response;
    }
    let Ok(serving) = app.serving() else { return response };
    let http = &serving.metrics.http;
    http.replied(route, response.status().as_u16());
    if let Some(reason) = reason {
        http.rejected(reason);
    }
    let events = HeaderValue::from_static("text/event-stream");
    if response.headers().get(header::CONTENT_TYPE) != Some(&events) {
        return response;
    }
    // The stream is counted as in progress until its body is dropped.
    guarded(response, http.stream())
}

impl AppState {
    /// Counts and logs a request that was rejected because of its head, before routing; does nothing before
    /// the model is loaded.
    pub fn count_rejected_head(&self, error: &ApiError) {
        self.rejections.log(NO_ROUTE, error);
        let Ok(serving) = self.serving() else { return };
        let http = &serving.metrics.http;
        http.replied(NO_ROUTE, error.status.as_u16());
        http.rejected(error.reason);
    }
}
