//! What happens to every request before and after its route: header caps, the reserve, panics, the
//! shape of errors, and the mark that a reply has been sent whole.

use super::connection::Progress;
use super::error::ApiError;
use super::messages::error::{is_read_on, reshaped};
use super::openai::params::is_request_id;
use super::routes::PROBE_PATHS;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use futures::FutureExt;
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tower::ServiceExt;
use tracing::{Instrument, Span, field};

const HEADERS_MAX: usize = 64;
const HEADER_BYTES_MAX: usize = 64 << 10;

/// Whether a connection may do everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Every route.
    Full,
    /// Probes only: the connection limit is reached.
    ProbesOnly,
}

/// Answers one request.
pub async fn answer(
    router: Router,
    access: Access,
    progress: Arc<Progress>,
    request: Request<hyper::body::Incoming>,
) -> Response<Body> {
    progress.busy();
    let id = request.headers().get("x-request-id").cloned();
    let known = id.filter(|id| id.to_str().is_ok_and(is_request_id));
    let of_messages = is_read_on(request.uri().path());
    let mut response = match check(&request, access) {
        Ok(()) => route(router, request).instrument(span_of(known.as_ref())).await,
        Err(error) => {
            progress.app().refused_head(&error);
            let mut response = error.into_response();
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
            response
        }
    };
    if of_messages {
        response = reshaped(response);
    }
    if let Some(id) = known {
        response.headers_mut().entry("x-request-id").or_insert(id);
    }
    response.map(|body| Body::new(Sent { body, progress }))
}

/// What all lines of the log about a request have in common. One that its client did not name gets its name later.
fn span_of(id: Option<&HeaderValue>) -> Span {
    let span = tracing::error_span!("request", id = field::Empty);
    if let Some(id) = id.and_then(|id| id.to_str().ok()) {
        span.record("id", id);
    }
    span
}

async fn route(router: Router, request: Request<hyper::body::Incoming>) -> Response<Body> {
    let reply = AssertUnwindSafe(router.oneshot(request.map(Body::new))).catch_unwind().await;
    match reply {
        Ok(Ok(response)) => response,
        Ok(Err(never)) => match never {},
        Err(_) => {
            tracing::error!("a handler panicked");
            ApiError::internal().into_response()
        }
    }
}

fn check<B>(request: &Request<B>, access: Access) -> Result<(), ApiError> {
    let headers = request.headers();
    if headers.len() > HEADERS_MAX || header_bytes(headers) > HEADER_BYTES_MAX {
        return Err(header_limit());
    }
    if access == Access::ProbesOnly && !PROBE_PATHS.contains(&request.uri().path()) {
        return Err(ApiError::unavailable("connections", "too many connections", 1));
    }
    Ok(())
}

/// 431: a head that is too long.
pub(super) fn header_limit() -> ApiError {
    let message = format!("more than {HEADERS_MAX} header fields or {HEADER_BYTES_MAX} bytes");
    ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "header_limit", message)
}

fn header_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum()
}

/// A body that tells the connection when it is gone, sent or not.
struct Sent {
    body: Body,
    progress: Arc<Progress>,
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.progress.idle();
    }
}
