//! Opens listening sockets and accepts connections, up to a maximum number.

use super::app::AppState;
use super::connection::{self, ConnectionTimeouts};
use super::middleware::ConnectionAccess;
use axum::Router;
use metrics::LogRateLimiter;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Length of the accept queue. The queue is long because a SYN that arrives at a full queue is retransmitted
/// after 1 s, which would dominate the p99 latency of a burst.
const BACKLOG: u32 = 4_096;
/// Number of connections accepted beyond the limit; they can send probes only.
const PROBE_RESERVE: usize = 32;
/// Timeouts of a connection accepted beyond the limit.
const PROBE_RESERVE_TIMEOUTS: ConnectionTimeouts = ConnectionTimeouts {
    header: Duration::from_secs(1),
    idle: Duration::from_secs(1),
    write: Duration::from_secs(1),
};
/// Pause after `accept` failed, for example because the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Opens a listening socket.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Limits the number of connections of one server, and closes them at shutdown.
#[derive(Debug, Clone)]
pub struct ConnectionLimiter {
    permits: Arc<Semaphore>,
    probe_permits: Arc<Semaphore>,
    count: u32,
    stop: watch::Sender<bool>,
}

impl ConnectionLimiter {
    /// Allows at most `count` connections at a time, plus `PROBE_RESERVE` connections for probes.
    pub fn new(count: u32) -> Self {
        let permits = Arc::new(Semaphore::new(count as usize));
        let probe_permits = Arc::new(Semaphore::new(PROBE_RESERVE));
        Self { permits, probe_permits, count, stop: watch::Sender::new(false) }
    }

    /// Accepts connections until the returned future is dropped. `router` handles their requests; `app`
    /// counts requests that match no route.
    pub async fn accept(
        &self,
        listener: TcpListener,
        app: Arc<AppState>,
        router: Router,
        deadlines: ConnectionTimeouts,
    ) {
        let failures = LogRateLimiter::default();
        loop {
            let stream = accept_with_retries(&listener, &failures).await;
            let (permit, access) = self.acquire_permit().await;
            let (app, router, stop) = (Arc::clone(&app), router.clone(), self.stop.subscribe());
            let deadlines = match access {
                ConnectionAccess::Full => deadlines,
                ConnectionAccess::ProbesOnly => PROBE_RESERVE_TIMEOUTS,
            };
            tokio::spawn(async move {
                serve(stream, app, router, access, deadlines, stop).await;
                drop(permit);
            });
        }
    }

    /// Acquires a permit for a connection. Waits only if the permits for probes are also in use.
    async fn acquire_permit(&self) -> (Option<OwnedSemaphorePermit>, ConnectionAccess) {
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return (Some(permit), ConnectionAccess::Full);
        }
        let permit = Arc::clone(&self.probe_permits).acquire_owned().await;
        (permit.ok(), ConnectionAccess::ProbesOnly)
    }

    /// Closes every connection after its current reply; returns once all connections are closed.
    pub async fn close(&self) {
        self.stop.send_replace(true);
        // Semaphores are never closed, so `acquire_many` returns only when all permits are acquired.
        let _ = self.permits.acquire_many(self.count).await;
    }
}

/// Accepts one connection; after a failure, pauses and tries again. `failures` limits the log of failures.
async fn accept_with_retries(listener: &TcpListener, failures: &LogRateLimiter) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                if let Some(unlogged) = failures.allow(Instant::now()) {
                    tracing::warn!(%error, unlogged, "accept failed");
                }
            }
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

async fn serve(
    stream: TcpStream,
    app: Arc<AppState>,
    router: Router,
    access: ConnectionAccess,
    deadlines: ConnectionTimeouts,
    stop: watch::Receiver<bool>,
) {
    // Without TCP_NODELAY, small writes wait for acknowledgements (measured: 60 times fewer replies per
    // second).
    if let Err(error) = stream.set_nodelay(true) {
        return tracing::debug!(%error, "cannot set TCP_NODELAY: the peer has disconnected");
    }
    connection::serve(stream, app, router, access, deadlines, stop).await;
}
