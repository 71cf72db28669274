//! Health state for the HTTP health probes, derived from heartbeats and step progress, never from generated
//! output.
//!
//! The state consists of atomics, so the scheduler thread never waits for a reader, and a read does not
//! depend on other components.

use metrics::RestartFailureKind;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

/// Time since the last heartbeat of the scheduler thread, in milliseconds, after which the thread counts as
/// stalled. The heartbeat period is 250 ms, and probes must report a fault within one second.
const STALL_MS: u64 = 900;
/// Expected restart time in seconds that is reported until a restart has been measured.
const RESTART_S: u32 = 10;

/// Tracks the health of the server; the HTTP health probes read it.
#[derive(Debug)]
pub struct HealthMonitor {
    start: Instant,
    phase: AtomicU8,
    draining: AtomicBool,
    /// Time of the last heartbeat of the scheduler thread, in milliseconds since `start`.
    heartbeat_ms: AtomicU64,
    /// Send time of the step whose deadline is checked, in milliseconds since `start`, plus one; 0 = no step
    /// is checked.
    step_sent_ms: AtomicU64,
    step_deadline_ms: AtomicU64,
    restart_began_ms: AtomicU64,
    /// Duration of the last executor restart in milliseconds; 0 = no restart yet.
    restart_took_ms: AtomicU64,
    /// Class of the last failed restart: its index in `RestartFailureKind::ALL`, plus one; 0 = the last
    /// restart did not fail.
    start_failure: AtomicU8,
}

/// Health status of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerStatus {
    /// Executors are starting, for example loading weights.
    Starting,
    /// Requests are served.
    Serving,
    /// No replica is serving, and at least one replica is restarting. Requests wait in the queue.
    Restarting,
    /// The process is running, but no replica is serving and none will serve again.
    Unavailable,
    /// The step whose deadline is checked is overdue, or the scheduler thread is stalled.
    Stalled,
    /// The server is shutting down.
    Draining,
}

const STARTING: u8 = 0;
const SERVING: u8 = 1;
const UNAVAILABLE: u8 = 2;
const RESTARTING: u8 = 3;

impl Default for HealthMonitor {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            phase: AtomicU8::new(STARTING),
            draining: AtomicBool::new(false),
            heartbeat_ms: AtomicU64::new(0),
            step_sent_ms: AtomicU64::new(0),
            step_deadline_ms: AtomicU64::new(5_000),
            restart_began_ms: AtomicU64::new(0),
            restart_took_ms: AtomicU64::new(0),
            start_failure: AtomicU8::new(0),
        }
    }
}

impl HealthMonitor {
    /// Returns the milliseconds since the creation of this monitor.
    pub fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Records a heartbeat of the scheduler thread; returns its time in milliseconds, on the clock of
    /// `now_ms`.
    pub fn heartbeat(&self) -> u64 {
        let now_ms = self.now_ms();
        self.heartbeat_ms.store(now_ms, Ordering::Relaxed);
        now_ms
    }

    /// Marks the server as serving after its start. A failure recorded earlier is kept.
    pub fn set_started(&self) {
        self.heartbeat();
        let (old, new) = (STARTING, SERVING);
        let _ = self.phase.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records that the executors of a replica failed and are restarting. `serving`: another replica is still
    /// serving.
    pub fn set_executors_failed(&self, serving: bool) {
        self.restart_began_ms.store(self.now_ms(), Ordering::Relaxed);
        if !serving {
            self.phase.store(RESTARTING, Ordering::Release);
        }
    }

    /// Records that the executors of a replica are ready again: the server is serving, and the duration of
    /// this restart becomes the estimate for the next restart.
    pub fn set_executors_restored(&self) {
        let took = self.now_ms().saturating_sub(self.restart_began_ms.load(Ordering::Relaxed));
        self.restart_took_ms.store(took.max(1), Ordering::Relaxed);
        self.phase.store(SERVING, Ordering::Release);
    }

    /// Sets the class of the last failed restart; `None` = there was no restart, or the last one succeeded.
    pub fn set_start_failure(&self, failure: Option<RestartFailureKind>) {
        let code = failure.map_or(0, |failure| failure as u8 + 1);
        self.start_failure.store(code, Ordering::Relaxed);
    }

    /// Returns the class of the last failed restart; `None` = there was no restart, or the last one
    /// succeeded.
    pub fn start_failure(&self) -> Option<RestartFailureKind> {
        let code = usize::from(self.start_failure.load(Ordering::Relaxed));
        code.checked_sub(1).and_then(|at| RestartFailureKind::ALL.get(at)).copied()
    }

    /// Marks the server as permanently unable to serve.
    pub fn set_unavailable(&self) {
        self.phase.store(UNAVAILABLE, Ordering::Release);
    }

    /// Marks the process as shutting down; this state is final.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Sets the step whose deadline `status` checks. The step was sent at `sent_ms` and is overdue
    /// `deadline_ms` milliseconds later.
    pub fn step_sent(&self, sent_ms: u64, deadline_ms: u64) {
        self.step_deadline_ms.store(deadline_ms, Ordering::Relaxed);
        self.step_sent_ms.store(sent_ms + 1, Ordering::Relaxed);
    }

    /// Records that no step is in flight whose deadline `status` must check.
    pub fn steps_completed(&self) {
        self.step_sent_ms.store(0, Ordering::Relaxed);
    }

    /// Returns the estimated seconds until failed executors are ready: the duration of the last restart,
    /// clamped to the range 1 to 60.
    pub fn restart_s(&self) -> u32 {
        match self.restart_took_ms.load(Ordering::Relaxed) {
            0 => RESTART_S,
            took_ms => took_ms.div_ceil(1_000).clamp(1, 60) as u32,
        }
    }

    /// Returns the current health status.
    pub fn status(&self) -> ServerStatus {
        if self.draining.load(Ordering::Acquire) {
            return ServerStatus::Draining;
        }
        match self.phase.load(Ordering::Acquire) {
            STARTING => ServerStatus::Starting,
            UNAVAILABLE => ServerStatus::Unavailable,
            RESTARTING if !self.is_heartbeat_overdue() => ServerStatus::Restarting,
            _ if self.is_stalled() => ServerStatus::Stalled,
            _ => ServerStatus::Serving,
        }
    }

    fn is_stalled(&self) -> bool {
        let now = self.now_ms();
        let sent = self.step_sent_ms.load(Ordering::Relaxed);
        let is_step_overdue =
            sent > 0 && now.saturating_sub(sent) > self.step_deadline_ms.load(Ordering::Relaxed);
        is_step_overdue || self.is_heartbeat_overdue()
    }

    /// Whether the heartbeat of the scheduler thread is overdue.
    fn is_heartbeat_overdue(&self) -> bool {
        self.now_ms().saturating_sub(self.heartbeat_ms.load(Ordering::Relaxed)) > STALL_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the cause of each kind of failed restart is kept until it is cleared.
    fn check_start_failures(health: &HealthMonitor) {
        for failure in RestartFailureKind::ALL {
            health.set_start_failure(Some(failure));
            assert_eq!(health.start_failure(), Some(failure));
        }
        health.set_start_failure(None);
        assert_eq!(health.start_failure(), None);
    }

    #[test]
    fn health_status_follows_the_state_table() {
        let health = HealthMonitor::default();
        assert_eq!(health.status(), ServerStatus::Starting);
        health.set_started();
        assert_eq!(health.status(), ServerStatus::Serving);
        health.set_executors_failed(true);
        assert_eq!(health.status(), ServerStatus::Serving);
        health.set_executors_failed(false);
        assert_eq!(health.status(), ServerStatus::Restarting);
        health.set_started(); // Has no effect in this phase.
        assert_eq!(health.status(), ServerStatus::Restarting);
        assert_eq!(health.restart_s(), 10, "before the first restart");
        assert_eq!(health.start_failure(), None);
        check_start_failures(&health);
        health.set_executors_restored();
        assert_eq!(health.restart_s(), 1);
        health.step_sent(0, 0);
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(health.status(), ServerStatus::Stalled);
        health.steps_completed();
        assert_eq!(health.status(), ServerStatus::Serving);
        health.set_unavailable();
        assert_eq!(health.status(), ServerStatus::Unavailable);
        health.set_draining();
        assert_eq!(health.status(), ServerStatus::Draining);
    }
}
