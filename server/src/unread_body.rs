//! The part of a request body that no handler has read, for example because the API key is wrong. hyper closes a
//! connection whose request body is not read to its end, without a `Connection: close` header in the reply. A client
//! would then send its next request on a closed connection, or lose the reply if the server's kernel sends RST.

use super::connection::ConnectionProgress;
use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of bytes of a body that are read and discarded before the reply is sent.
const DISCARDED_MAX: u64 = 4 << 20;
/// Maximum time for which the rest of a body is awaited before the reply is sent.
const DISCARD_TIME: Duration = Duration::from_secs(1);

/// Destination of a request body that is dropped before its end.
#[derive(Clone, Default)]
pub(crate) struct UnreadBody(Arc<Mutex<Option<Incoming>>>);

impl UnreadBody {
    /// Stores the rest of a request body.
    pub(crate) fn put(&self, rest: Incoming) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(rest);
    }

    /// Reads and discards the rest of the request body, if there is one. If it is too long, too slow or not yet
    /// requested by an interim response (`expects_continue`), `response` gets a `Connection: close` header, and the
    /// socket discards what the client still sends.
    pub(crate) async fn discard(
        self,
        response: &mut Response<Body>,
        expects_continue: bool,
        progress: &ConnectionProgress,
    ) {
        let rest = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(rest) = rest else { return };
        // The server is overloaded, or the request head is invalid: the connection is closed at once.
        if response.headers().contains_key(header::CONNECTION) {
            return;
        }
        let is_late = expects_continue || response.status() == StatusCode::REQUEST_TIMEOUT;
        if !is_late && discard_all(rest, progress).await {
            return;
        }
        progress.on_unread_body();
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Reads and discards `body`; returns whether its end was reached.
async fn discard_all(mut body: Incoming, progress: &ConnectionProgress) -> bool {
    if body.size_hint().lower() > DISCARDED_MAX {
        return false;
    }
    let read = async {
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return false };
            bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
            if bytes > DISCARDED_MAX {
                return false;
            }
        }
        progress.on_request_complete();
        true
    };
    tokio::time::timeout(DISCARD_TIME, read).await.unwrap_or(false)
}
