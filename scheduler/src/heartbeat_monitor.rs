//! When somebody who gives a sign of life every second is taken for gone.

use kvcache::{FaultInjection, InjectedFault};
use std::time::Duration;

/// Time without a sign of life.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Had whoever listens been paused, what arrived meanwhile is there at once.
pub const HEARTBEAT_GRACE_PERIOD: Duration = Duration::from_secs(1);

/// What somebody who waits for the next sign of life has seen of the silence so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeartbeatMonitor {
    /// Whether it has lasted too long once.
    in_grace_period: bool,
    /// Bug in force, for simulations of a build with the feature `planted`.
    pub fault_injection: FaultInjection,
}

impl HeartbeatMonitor {
    /// How long to wait for the next sign of life.
    pub fn timeout(self) -> Duration {
        if self.in_grace_period { HEARTBEAT_GRACE_PERIOD } else { HEARTBEAT_TIMEOUT }
    }

    /// There was one.
    pub fn on_heartbeat(&mut self) {
        self.in_grace_period = false;
    }

    /// There was none for as long as that. Whether whoever is silent counts as gone: one look is not enough, because
    /// time passes while a paused process cannot look.
    pub fn on_timeout(&mut self) -> bool {
        std::mem::replace(&mut self.in_grace_period, true)
            || self.fault_injection.is_active(InjectedFault::PauseCountsAsHeartbeatTimeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_needs_timeout_and_grace_period() {
        let mut silence = HeartbeatMonitor::default();
        assert_eq!(silence.timeout(), HEARTBEAT_TIMEOUT);
        assert!(!silence.on_timeout(), "this process may have been paused");
        assert_eq!(silence.timeout(), HEARTBEAT_GRACE_PERIOD);
        silence.on_heartbeat();
        assert_eq!(silence.timeout(), HEARTBEAT_TIMEOUT);
        assert!(!silence.on_timeout() && silence.on_timeout());
    }
}
