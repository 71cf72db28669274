//! One connection: HTTP/1.1 under deadlines for headers, idleness and writing.
//!
//! One timer per connection, moved only when it fires; a busy connection pays nothing for it.

use super::app::App;
use super::error::ApiError;
use super::gate::{self, Access};
use super::timed_io::TimedIo;
use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Deadlines of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// From the first byte of a header to its last.
    pub header: Duration,
    /// Between requests.
    pub idle: Duration,
    /// Without a byte taken by the client.
    pub write: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { header: seconds(5), idle: seconds(60), write: seconds(30) }
    }
}

/// Headers beyond this are refused by hyper itself (`bare_reply`), between it and `gate`'s cap by `gate`.
const READ_BUFFER_BYTES: usize = 160 << 10;
const PARSED_HEADERS_MAX: usize = 128;

/// Serves a connection until it ends, a deadline passes, or `stop` asks for an end after the
/// current reply.
pub async fn serve(
    stream: TcpStream,
    app: Arc<App>,
    router: Router,
    access: Access,
    deadlines: Deadlines,
    mut stop: watch::Receiver<bool>,
) {
    let progress = Arc::new(Progress::new(app));
    let io = TimedIo::new(stream, Arc::clone(&progress), deadlines.write);
    let service = {
        let progress = Arc::clone(&progress);
        service_fn(move |request: Request<Incoming>| {
            let answer = gate::answer(router.clone(), access, Arc::clone(&progress), request);
            async move { Ok::<_, Infallible>(answer.await) }
        })
    };
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(None) // It would also cut idle connections; `Progress` tells them apart.
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

/// What a connection is doing, and since when.
pub struct Progress {
    app: Arc<App>,
    start: Instant,
    phase: AtomicU8,
    since_ms: AtomicU64,
}

const IDLE: u8 = 0;
const HEADER: u8 = 1;
const BUSY: u8 = 2;

impl Progress {
    fn new(app: Arc<App>) -> Self {
        let (phase, since_ms) = (AtomicU8::new(IDLE), AtomicU64::new(0));
        Self { app, start: Instant::now(), phase, since_ms }
    }

    /// A request is being answered.
    pub fn busy(&self) {
        self.phase.store(BUSY, Ordering::Relaxed);
    }

    /// The reply is gone.
    pub fn idle(&self) {
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
    pub(super) fn refused(&self, error: &ApiError) {
        self.enter(HEADER);
        self.app.refused_head(error);
    }

    /// Whom to tell of requests that no route sees.
    pub(super) fn app(&self) -> &App {
        &self.app
    }

    /// Completes when the connection has been idle, or at a header, for too long.
    async fn expired(&self, deadlines: Deadlines) {
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
