//! Detects the failure of a peer that should send a heartbeat every second.

use std::time::Duration;

/// Time without a heartbeat after which the grace period starts.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Further time without a heartbeat after which the peer counts as failed. It is short: if this process was
/// paused, heartbeats sent during the pause are already queued and are read at once.
pub const HEARTBEAT_GRACE_PERIOD: Duration = Duration::from_secs(1);

/// State of the wait for the next heartbeat of one peer.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeartbeatMonitor {
    /// Whether `HEARTBEAT_TIMEOUT` has expired since the last heartbeat, so that `HEARTBEAT_GRACE_PERIOD`
    /// runs.
    in_grace_period: bool,
}

impl HeartbeatMonitor {
    /// Returns how long to wait for the next heartbeat.
    pub fn timeout(self) -> Duration {
        if self.in_grace_period { HEARTBEAT_GRACE_PERIOD } else { HEARTBEAT_TIMEOUT }
    }

    /// Records a heartbeat, which ends the grace period.
    pub fn on_heartbeat(&mut self) {
        self.in_grace_period = false;
    }

    /// Records that `timeout` expired without a heartbeat. Returns whether the peer has failed. One expiry is
    /// not enough: time also passes while this process is paused and cannot read heartbeats.
    pub fn on_timeout(&mut self) -> bool {
        std::mem::replace(&mut self.in_grace_period, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_needs_timeout_and_grace_period() {
        let mut monitor = HeartbeatMonitor::default();
        assert_eq!(monitor.timeout(), HEARTBEAT_TIMEOUT);
        assert!(!monitor.on_timeout(), "this process may have been paused");
        assert_eq!(monitor.timeout(), HEARTBEAT_GRACE_PERIOD);
        monitor.on_heartbeat();
        assert_eq!(monitor.timeout(), HEARTBEAT_TIMEOUT);
        assert!(!monitor.on_timeout() && monitor.on_timeout());
    }
}
