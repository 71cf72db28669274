//! Serves one HTTP/1.1 connection with hyper, with timeouts for request heads, idle time and writes.
//!
//! There is one timer per connection. It is reset only when it fires, so requests on a busy connection do not
//! touch the timer.

use super::api_error::ApiError;
use super::app::AppState;
use super::client_socket::ClientSocket;
use super::middleware::{self, ConnectionAccess};
use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Timeouts of one connection.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionTimeouts {
    /// Maximum time from the first byte of a request head to its last byte.
    pub header: Duration,
    /// Maximum idle time between two requests.
    pub idle: Duration,
    /// Maximum time that a write may make no progress.
    pub write: Duration,
}

impl Default for ConnectionTimeouts {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { header: seconds(5), idle: seconds(60), write: seconds(30) }
    }
}

/// Size of hyper's read buffer. hyper rejects longer request heads (see `hyper_error_reply`); `middleware`
/// rejects shorter heads that exceed its own limits.
const READ_BUFFER_BYTES: usize = 160 << 10;
const PARSED_HEADERS_MAX: usize = 128;

/// Serves a connection until it ends, a timeout expires, or `stop` requests a graceful shutdown after the
/// current reply.
pub(crate) async fn serve(
    stream: TcpStream,
    app: Arc<AppState>,
    router: Router,
    access: ConnectionAccess,
    deadlines: ConnectionTimeouts,
    mut stop: watch::Receiver<bool>,
) {
    let progress = Arc::new(ConnectionProgress::new(app));
    let io = ClientSocket::new(stream, Arc::clone(&progress), deadlines.write);
    let service = {
        let progress = Arc::clone(&progress);
        service_fn(move |request: Request<Incoming>| {
            let reply = middleware::handle(router.clone(), access, Arc::clone(&progress), request);
            async move { Ok::<_, Infallible>(reply.await) }
        })
    };
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(None) // It would also close idle connections; see `ConnectionProgress`.
        .max_buf_size(READ_BUFFER_BYTES)
        .max_headers(PARSED_HEADERS_MAX)
        .writev(false);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));
    let mut expired = pin!(progress.expired(deadlines));
    let mut stopping = *stop.borrow();
    if stopping {
        connection.as_mut().graceful_shutdown();
    }
    loop {
        tokio::select! {
            biased;
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(%error, "connection ended");
                }
                return;
            }
            () = expired.as_mut() => return,
            changed = stop.changed(), if !stopping => {
                stopping = true;
                if changed.is_ok() {
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

/// State of the requests on a connection when the client closes its sending half (FIN).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestStateAtFin {
    /// The client has sent no complete request head.
    NoRequest,
    /// All replies have been produced; the last bytes of the last reply may be unsent.
    RepliesDone,
    /// A request is incomplete, unless its rest is still in the receive buffer.
    MaybeTruncated,
    /// The request has been received completely. The client may wait for the reply, or may have disconnected.
    RequestComplete,
}

/// Phase of a connection and its start time, which determine the timeouts and how FIN is handled.
pub(crate) struct ConnectionProgress {
    app: Arc<AppState>,
    start: Instant,
    phase: AtomicU8,
    since_ms: AtomicU64,
    /// Number of request heads read on this connection.
    requests: AtomicU64,
    /// Whether the latest request is HTTP/1.1: only HTTP/1.1 clients accept interim responses.
    accepts_interim: AtomicBool,
    /// Whether the reply to the latest request is an SSE stream.
    is_event_stream: AtomicBool,
    /// Whether the connection ends with a request body that was not read to its end.
    has_unread_body: AtomicBool,
}

const IDLE: u8 = 0;
const HEADER: u8 = 1;
/// Phase: the request head has been read, but the request body has not been read completely.
const BUSY: u8 = 2;
/// Phase: the whole request has been read.
const RESPONDING: u8 = 3;

impl ConnectionProgress {
    fn new(app: Arc<AppState>) -> Self {
        Self {
            app,
            start: Instant::now(),
            phase: AtomicU8::new(IDLE),
            since_ms: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            accepts_interim: AtomicBool::new(false),
            is_event_stream: AtomicBool::new(false),
            has_unread_body: AtomicBool::new(false),
        }
    }

    /// Records that a request head has been read.
    pub(crate) fn on_request_head(&self, accepts_interim: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.accepts_interim.store(accepts_interim, Ordering::Relaxed);
        self.is_event_stream.store(false, Ordering::Relaxed);
        self.phase.store(BUSY, Ordering::Relaxed);
    }

    /// Records that the whole request has been read.
    pub(crate) fn on_request_complete(&self) {
        // The phase may have changed already: the rest of a body may arrive after the reply.
        let _ = self.phase.compare_exchange(BUSY, RESPONDING, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Records that the reply is an SSE stream.
    pub(crate) fn on_event_stream(&self) {
        self.is_event_stream.store(true, Ordering::Relaxed);
    }

    /// Returns the number of the latest request on this connection, from 1.
    pub(super) fn request(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns the state of the requests when FIN arrives in the current phase.
    pub(super) fn classify_end_of_input(&self) -> RequestStateAtFin {
        match self.phase.load(Ordering::Relaxed) {
            BUSY => RequestStateAtFin::MaybeTruncated,
            RESPONDING => RequestStateAtFin::RequestComplete,
            IDLE if self.request() > 0 => RequestStateAtFin::RepliesDone,
            _ => RequestStateAtFin::NoRequest,
        }
    }

    /// Returns a probe: bytes that a client ignores while it waits for the reply; `None` if no bytes are
    /// ignored in the current state. `reply_started`: a part of the reply has been sent.
    pub(super) fn half_close_probe(&self, reply_started: bool) -> Option<&'static [u8]> {
        let interim = self.accepts_interim.load(Ordering::Relaxed);
        let events = self.is_event_stream.load(Ordering::Relaxed);
        match (reply_started, interim, events) {
            (false, true, _) => Some(b"HTTP/1.1 100 Continue\r\n\r\n"),
            // The probe is an HTTP chunk that contains an SSE comment.
            (true, true, true) => Some(b"3\r\n:\n\n\r\n"),
            _ => None,
        }
    }

    /// Records that the reply was sent completely or dropped.
    pub(crate) fn on_reply_done(&self) {
        self.enter(IDLE);
    }

    fn enter(&self, phase: u8) {
        self.since_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// Records received bytes; returns whether the bytes begin a request head.
    pub(super) fn on_bytes_received(&self) -> bool {
        let starts_head = self.phase.load(Ordering::Relaxed) == IDLE;
        if starts_head {
            self.enter(HEADER);
        }
        starts_head
    }

    /// Records that a request head was rejected. The header timeout then limits the rest of the client's
    /// input.
    pub(super) fn on_head_rejected(&self, error: &ApiError) {
        self.enter(HEADER);
        self.app.count_rejected_head(error);
    }

    /// Records that the rest of a request body is not read before the reply, which is the last one of the connection.
    pub(crate) fn on_unread_body(&self) {
        self.has_unread_body.store(true, Ordering::Relaxed);
    }

    /// Returns whether the client may still send a request body after the last reply. The header timeout then limits
    /// the rest of the client's input.
    pub(super) fn take_unread_body(&self) -> bool {
        let is_unread = self.has_unread_body.swap(false, Ordering::Relaxed);
        if is_unread {
            self.enter(HEADER);
        }
        is_unread
    }

    /// Returns the application state, which counts requests that match no route.
    pub(super) fn app(&self) -> &AppState {
        &self.app
    }

    /// Completes when the connection exceeds the idle timeout or the header timeout.
    async fn expired(&self, deadlines: ConnectionTimeouts) {
        let mut check_at = self.start + deadlines.header.min(deadlines.idle);
        loop {
            sleep_until(check_at).await;
            let now = Instant::now();
            let since = self.start + Duration::from_millis(self.since_ms.load(Ordering::Relaxed));
            let limit = match self.phase.load(Ordering::Relaxed) {
                IDLE => deadlines.idle,
                HEADER => deadlines.header,
                _ => {
                    check_at = now + deadlines.header;
                    continue;
                }
            };
            if since + limit <= now {
                return;
            }
            // A new request head may begin at any time, so the timer never sleeps longer than the header
            // timeout.
            check_at = (since + limit).min(now + deadlines.header);
        }
    }
}
