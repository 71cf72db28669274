//! One connection: HTTP/1.1 under deadlines for headers, idleness and writing.
//!
//! One timer per connection, moved only when it fires; a busy connection pays nothing for it.

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

/// Deadlines of a connection.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionDeadlines {
    /// From the first byte of a header to its last.
    pub header: Duration,
    /// Between requests.
    pub idle: Duration,
    /// Without a byte taken by the client.
    pub write: Duration,
}

impl Default for ConnectionDeadlines {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { header: seconds(5), idle: seconds(60), write: seconds(30) }
    }
}

/// Headers beyond this are refused by hyper itself (`hyper_error_reply`), between it and `middleware`'s cap by `middleware`.
const READ_BUFFER_BYTES: usize = 160 << 10;
const PARSED_HEADERS_MAX: usize = 128;

/// Serves a connection until it ends, a deadline passes, or `stop` asks for an end after the
/// current reply.
pub(crate) async fn serve(
    stream: TcpStream,
    app: Arc<AppState>,
    router: Router,
    access: ConnectionAccess,
    deadlines: ConnectionDeadlines,
    mut stop: watch::Receiver<bool>,
) {
    let progress = Arc::new(ConnectionProgress::new(app));
    let io = ClientSocket::new(stream, Arc::clone(&progress), deadlines.write);
    let service = {
        let progress = Arc::clone(&progress);
        service_fn(move |request: Request<Incoming>| {
            let answer = middleware::handle(router.clone(), access, Arc::clone(&progress), request);
            async move { Ok::<_, Infallible>(answer.await) }
        })
    };
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(None) // It would also cut idle connections; `ConnectionProgress` tells them apart.
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

/// What the end of a client's bytes means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndOfInput {
    /// The client has never asked for anything, or not in full.
    NoRequest,
    /// The client has asked for nothing else since the last reply, whose last bytes may not be sent yet.
    AllAnswered,
    /// The client has left in the middle of a request, unless the rest is about to be looked at.
    MaybeTruncated,
    /// The client has asked for what it wanted. It may wait for the answer, or have left.
    RequestComplete,
}

/// What a connection is doing, and since when.
pub(crate) struct ConnectionProgress {
    app: Arc<AppState>,
    start: Instant,
    phase: AtomicU8,
    since_ms: AtomicU64,
    /// Requests whose heads have been read.
    requests: AtomicU64,
    /// Whether the newest one is of HTTP/1.1: its client may get interim responses.
    takes_interim: AtomicBool,
    /// Whether it is answered with a stream of events.
    is_event_stream: AtomicBool,
}

const IDLE: u8 = 0;
const HEADER: u8 = 1;
/// The head has been read.
const BUSY: u8 = 2;
/// The body has been read as well.
const RESPONDING: u8 = 3;

impl ConnectionProgress {
    fn new(app: Arc<AppState>) -> Self {
        Self {
            app,
            start: Instant::now(),
            phase: AtomicU8::new(IDLE),
            since_ms: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            takes_interim: AtomicBool::new(false),
            is_event_stream: AtomicBool::new(false),
        }
    }

    /// A request's head has been read.
    pub(crate) fn busy(&self, takes_interim: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.takes_interim.store(takes_interim, Ordering::Relaxed);
        self.is_event_stream.store(false, Ordering::Relaxed);
        self.phase.store(BUSY, Ordering::Relaxed);
    }

    /// All of the request has been read.
    pub(crate) fn responding(&self) {
        // A body may be read after the reply.
        let _ = self.phase.compare_exchange(BUSY, RESPONDING, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The reply is a stream of events.
    pub(crate) fn streams_events(&self) {
        self.is_event_stream.store(true, Ordering::Relaxed);
    }

    /// Number of the newest request.
    pub(super) fn request(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// What the end of the client's bytes means now.
    pub(super) fn classify_end_of_input(&self) -> EndOfInput {
        match self.phase.load(Ordering::Relaxed) {
            BUSY => EndOfInput::MaybeTruncated,
            RESPONDING => EndOfInput::RequestComplete,
            IDLE if self.request() > 0 => EndOfInput::AllAnswered,
            _ => EndOfInput::NoRequest,
        }
    }

    /// Bytes that a client which waits for its answer skips; `has_begun`: some of the answer is sent. `None` = there
    /// are none.
    pub(super) fn half_close_probe(&self, has_begun: bool) -> Option<&'static [u8]> {
        let interim = self.takes_interim.load(Ordering::Relaxed);
        let events = self.is_event_stream.load(Ordering::Relaxed);
        match (has_begun, interim, events) {
            (false, true, _) => Some(b"HTTP/1.1 100 Continue\r\n\r\n"),
            // A chunk with a comment.
            (true, true, true) => Some(b"3\r\n:\n\n\r\n"),
            _ => None,
        }
    }

    /// The reply is gone.
    pub(crate) fn idle(&self) {
        self.enter(IDLE);
    }

    fn enter(&self, phase: u8) {
        self.since_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// Bytes came in; whether a head begins with them.
    pub(super) fn received(&self) -> bool {
        let begins = self.phase.load(Ordering::Relaxed) == IDLE;
        if begins {
            self.enter(HEADER);
        }
        begins
    }

    /// A head was refused: the rest of what the client sends has a header's time.
    pub(super) fn head_rejected(&self, error: &ApiError) {
        self.enter(HEADER);
        self.app.head_rejected(error);
    }

    /// Whom to tell of requests that no route sees.
    pub(super) fn app(&self) -> &AppState {
        &self.app
    }

    /// Completes when the connection has been idle, or at a header, for too long.
    async fn expired(&self, deadlines: ConnectionDeadlines) {
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
            // A new header may begin at any time: never sleep past its deadline.
            check_at = (since + limit).min(now + deadlines.header);
        }
    }
}
