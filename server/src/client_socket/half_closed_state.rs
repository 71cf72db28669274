//! State of a connection after the client has sent FIN. Until the last reply is written, the socket is polled
//! at intervals ("connection checks") for an error such as RST, which shows that the client has disconnected.

use socket2::SockRef;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// Minimum and maximum interval of the connection checks (polls for a socket error) after FIN; the interval
/// doubles after each check.
const CHECK_INTERVAL_FIRST: Duration = Duration::from_millis(1);
const CHECK_INTERVAL_LAST: Duration = Duration::from_millis(50);
/// Number of connection checks without a pending write after which hyper receives the end of the input.
/// Between two checks, hyper has time to write the rest of the last reply.
const IDLE_CHECKS: u32 = 2;

/// State of a connection after the client has sent FIN.
pub(super) struct HalfClosedState {
    pub(super) since: Instant,
    /// Interval until the next connection check (poll for a socket error).
    check_interval: Duration,
    timer: Pin<Box<Sleep>>,
    /// Number of the latest request during which a probe was sent: bytes to which a disconnected client
    /// replies with RST.
    pub(super) probed: Option<u64>,
    /// Number of connection checks since the last reply was complete and written; `None` while a reply is in
    /// progress.
    pub(super) idle_checks: Option<u32>,
}

impl HalfClosedState {
    /// Creates the state when FIN arrives, and sets the socket's `TCP_USER_TIMEOUT` to `limit`: the kernel
    /// closes the connection if sent data remains unacknowledged for longer than `limit`.
    pub(super) fn new(stream: &TcpStream, limit: Duration) -> Self {
        // If the network fails, no RST arrives; the kernel then closes the connection after `limit`.
        let _ = SockRef::from(stream).set_tcp_user_timeout(Some(limit));
        let since = Instant::now();
        let timer = Box::pin(sleep_until(since + CHECK_INTERVAL_FIRST));
        Self { since, check_interval: CHECK_INTERVAL_FIRST, timer, probed: None, idle_checks: None }
    }

    /// Resets the interval of the connection checks to its minimum.
    fn reset_checks(&mut self, cx: &mut Context<'_>) {
        self.check_interval = CHECK_INTERVAL_FIRST;
        self.timer.as_mut().reset(Instant::now() + self.check_interval);
        // The timer is polled so that it wakes `cx` at the new deadline.
        let _ = self.timer.as_mut().poll(cx);
    }

    /// Returns 1 if a connection check (poll for a socket error) is due, else 0. `cx` is woken when the next
    /// check is due.
    pub(super) fn due_checks(&mut self, cx: &mut Context<'_>) -> u32 {
        let mut checks = 0;
        while self.timer.as_mut().poll(cx).is_ready() {
            checks = 1;
            self.check_interval = (2 * self.check_interval).min(CHECK_INTERVAL_LAST);
            self.timer.as_mut().reset(Instant::now() + self.check_interval);
        }
        checks
    }

    /// Adds `checks` to the number of connection checks since the last reply was written. Returns ready
    /// when hyper must receive the end of the input.
    pub(super) fn poll_idle(&mut self, cx: &mut Context<'_>, checks: u32) -> Poll<()> {
        if self.idle_checks.is_none() {
            self.reset_checks(cx);
        }
        let checks = self.idle_checks.unwrap_or(0) + checks;
        self.idle_checks = Some(checks);
        if checks < IDLE_CHECKS { Poll::Pending } else { Poll::Ready(()) }
    }
}
