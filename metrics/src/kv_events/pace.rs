//! Minimum speed at which a peer must receive a replay.

use super::zmtp::PeerError;
use std::time::{Duration, Instant};

/// Time in which a peer must receive `STEP_BYTES`. A slower peer would occupy its connection, and the batches
/// of its replay, indefinitely. The limit allows a peer with large buffers that handles ten batches per
/// second and so reads nothing from the connection for half a minute.
const STEP_TIME: Duration = Duration::from_mins(3);
const STEP_BYTES: u64 = 64 << 10;

/// Monitor of the rate at which a peer receives a replay.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplayRateMonitor {
    since: Instant,
    sent_bytes: u64,
}

impl ReplayRateMonitor {
    /// Starts to monitor a replay on a connection that has sent `sent_bytes` bytes so far.
    pub(super) fn new(now: Instant, sent_bytes: u64) -> Self {
        Self { since: now, sent_bytes }
    }

    /// Checks the rate, given the total number of bytes that the connection has sent.
    ///
    /// Errors: `PeerError::TimedOut` if the peer has received less than `STEP_BYTES` in `STEP_TIME`.
    pub(super) fn check(&mut self, now: Instant, sent_bytes: u64) -> Result<(), PeerError> {
        if sent_bytes - self.sent_bytes >= STEP_BYTES {
            *self = Self::new(now, sent_bytes);
        }
        if now.duration_since(self.since) < STEP_TIME {
            return Ok(());
        }
        Err(PeerError::TimedOut { what: "a replay was not received", after: STEP_TIME })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_peers_time_out() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut pace = ReplayRateMonitor::new(start, 1_000);
        assert!(pace.check(at(179), 1_001).is_ok());
        assert!(pace.check(at(179), 1_000 + STEP_BYTES).is_ok());
        assert!(pace.check(at(358), 1_000 + STEP_BYTES + 1).is_ok());
        let error = pace.check(at(359), 2 * STEP_BYTES).unwrap_err();
        assert_eq!(error.to_string(), "a replay was not received after 180 s");
    }
}
