//! Middleware of every request: checks header limits, restricts some connections to probes, catches panics,
//! converts errors to the JSON form of the API, and tracks the completion of replies.

use super::anthropic::error::{in_anthropic_shape, is_anthropic_path};
use super::api_error::ApiError;
use super::connection::ConnectionProgress;
use super::guarded_body::guarded;
use super::openai::params::is_request_id;
use super::routes::PROBE_PATHS;
use super::unread_body::UnreadBody;
use axum::Router;
use axum::body::Body;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use futures::FutureExt;
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tower::ServiceExt;
use tracing::{Instrument, Span, field};

const HEADERS_MAX: usize = 64;
const HEADER_BYTES_MAX: usize = 64 << 10;

/// Routes that may be used on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionAccess {
    /// Every route.
    Full,
    /// Only probes, because the connection limit is reached.
    ProbesOnly,
}

/// Handles one request. The call itself updates `progress`, before the returned future is polled.
pub(crate) fn handle(
    router: Router,
    access: ConnectionAccess,
    progress: Arc<ConnectionProgress>,
    request: Request<hyper::body::Incoming>,
) -> impl Future<Output = Response<Body>> {
    progress.on_request_head(request.version() == Version::HTTP_11);
    let unread = UnreadBody::default();
    let request = request.map(|body| TrackedRequestBody::new(body, &progress, &unread));
    respond(router, access, progress, request, unread)
}

async fn respond(
    router: Router,
    access: ConnectionAccess,
    progress: Arc<ConnectionProgress>,
    request: Request<TrackedRequestBody>,
    unread: UnreadBody,
) -> Response<Body> {
    let id = request.headers().get("x-request-id").cloned();
    let expects_continue = request.headers().contains_key(header::EXPECT);
    let request_id = id.filter(|id| id.to_str().is_ok_and(is_request_id));
    let is_messages_api = is_anthropic_path(request.uri().path());
    let mut response = match check(&request, access) {
        Ok(()) => route(router, request).instrument(request_span(request_id.as_ref())).await,
        Err(error) => {
            drop(request);
            progress.app().count_rejected_head(&error);
            let mut response = error.into_response();
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
            response
        }
    };
    unread.discard(&mut response, expects_continue, &progress).await;
    if is_messages_api {
        response = in_anthropic_shape(response);
    }
    if is_event_stream(response.headers()) {
        progress.on_event_stream();
    }
    if let Some(id) = request_id {
        response.headers_mut().entry("x-request-id").or_insert(id);
    }
    guarded(response, ReplyProgressGuard(progress))
}

/// Creates the log span of a request. For a request without `x-request-id`, the id is recorded later.
fn request_span(id: Option<&HeaderValue>) -> Span {
    let span = tracing::error_span!("request", id = field::Empty);
    if let Some(id) = id.and_then(|id| id.to_str().ok()) {
        span.record("id", id);
    }
    span
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"))
}

async fn route(router: Router, request: Request<TrackedRequestBody>) -> Response<Body> {
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

fn check<B>(request: &Request<B>, access: ConnectionAccess) -> Result<(), ApiError> {
    let headers = request.headers();
    if headers.len() > HEADERS_MAX || header_bytes(headers) > HEADER_BYTES_MAX {
        return Err(headers_too_large());
    }
    check_host(request.version(), headers)?;
    if access == ConnectionAccess::ProbesOnly && !PROBE_PATHS.contains(&request.uri().path()) {
        return Err(ApiError::unavailable("connections", "too many connections", 1));
    }
    Ok(())
}

/// Checks `Host` according to RFC 9112, section 3.2: exactly one field, with a valid or empty host. HTTP/1.0
/// requests need no `Host`.
fn check_host(version: Version, headers: &HeaderMap) -> Result<(), ApiError> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let message = match (hosts.next(), hosts.next()) {
        (None, _) if version < Version::HTTP_11 => return Ok(()),
        (None, _) => "an HTTP/1.1 request needs a Host header",
        (Some(_), Some(_)) => "more than one Host header",
        (Some(host), None) if is_host(host.as_bytes()) => return Ok(()),
        (Some(_), None) => "the Host header is not HOST or HOST:PORT",
    };
    Err(ApiError::bad_request("invalid_host", "", message))
}

/// Whether a `Host` value is empty or a host with an optional port, without user information.
fn is_host(host: &[u8]) -> bool {
    host.is_empty() || (!host.contains(&b'@') && Authority::try_from(host).is_ok())
}

/// Creates the 431 error: the request head is too large.
pub(super) fn headers_too_large() -> ApiError {
    let message = format!("more than {HEADERS_MAX} header fields or {HEADER_BYTES_MAX} bytes");
    ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "header_limit", message)
}

fn header_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum()
}

/// Request body that notifies `ConnectionProgress` once the whole body has been received. If it is dropped before its
/// end, the rest is stored in `unread`.
struct TrackedRequestBody {
    /// `None` once the end has been received.
    body: Option<hyper::body::Incoming>,
    progress: Arc<ConnectionProgress>,
    unread: UnreadBody,
}

impl TrackedRequestBody {
    fn new(
        body: hyper::body::Incoming,
        progress: &Arc<ConnectionProgress>,
        unread: &UnreadBody,
    ) -> Self {
        let mut tracked =
            Self { body: Some(body), progress: Arc::clone(progress), unread: unread.clone() };
        tracked.check_end();
        tracked
    }

    fn check_end(&mut self) {
        if self.is_end_stream() {
            self.body = None;
            self.progress.on_request_complete();
        }
    }
}

impl Drop for TrackedRequestBody {
    fn drop(&mut self) {
        if let Some(rest) = self.body.take() {
            self.unread.put(rest);
        }
    }
}

impl HttpBody for TrackedRequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        if frame.is_none() {
            self.body = None;
            self.progress.on_request_complete();
        } else {
            self.check_end();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

/// Guard of a reply body that notifies `ConnectionProgress` when it is dropped.
struct ReplyProgressGuard(Arc<ConnectionProgress>);

impl Drop for ReplyProgressGuard {
    fn drop(&mut self) {
        self.0.on_reply_done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_host_accepted(version: Version, hosts: &[&str]) -> bool {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, HeaderValue::from_str(host).unwrap());
        }
        check_host(version, &headers).is_ok()
    }

    #[test]
    fn http_1_1_requests_require_exactly_one_host() {
        let (old, new) = (Version::HTTP_10, Version::HTTP_11);
        for host in ["example.org", "127.0.0.1:8000", "[::1]:8000", "localhost", "my_host", ""] {
            assert!(is_host_accepted(new, &[host]), "{host}");
        }
        for host in ["a b", "user@host", "http://host/", "host/path", "a,b:c:d"] {
            assert!(!is_host_accepted(new, &[host]), "{host}");
        }
        assert!(!is_host_accepted(new, &[]) && is_host_accepted(old, &[]));
        assert!(!is_host_accepted(new, &["a", "a"]) && !is_host_accepted(old, &["a", "b"]));
    }
}
