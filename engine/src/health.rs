//! What the probes say: judged on heartbeats and step progress, never on output.
//!
//! Plain atomics: writing costs the scheduler's thread nothing, reading touches no other part.

use metrics::StartFailure;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

/// A scheduler thread that has not looked around for so long is stalled. It does four times a second, and probes tell
/// of a fault within one.
const STALL_MS: u64 = 900;
/// A restart that nobody has measured yet.
const RESTART_S: u32 = 10;

/// State of the server as the probes see it.
#[derive(Debug)]
pub struct HealthState {
    start: Instant,
    phase: AtomicU8,
    draining: AtomicBool,
    /// Milliseconds since `start` of the last sign of life of the scheduler's thread.
    heartbeat_ms: AtomicU64,
    /// When the oldest unanswered step was sent, plus one; 0 = none.
    step_sent_ms: AtomicU64,
    step_deadline_ms: AtomicU64,
    restart_began_ms: AtomicU64,
    /// How long the last restart of the executor took; 0 = there was none.
    restart_took_ms: AtomicU64,
    /// Place in `StartFailure::ALL` of why the last start of lost executors failed, plus one; 0 = it did not.
    start_failure: AtomicU8,
}

/// Where the process is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerStatus {
    /// Weights are being loaded.
    Starting,
    /// Requests are served.
    Serving,
    /// No replica serves, and one at least is being started again; requests wait.
    Restarting,
    /// Alive, but no replica serves, and none will.
    Unavailable,
    /// A step is past its deadline, or the scheduler's thread is stalled.
    Stalled,
    /// Shutting down.
    Draining,
}

const STARTING: u8 = 0;
const SERVING: u8 = 1;
const UNAVAILABLE: u8 = 2;
const RESTARTING: u8 = 3;

impl Default for HealthState {
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

impl HealthState {
    /// Milliseconds since the process began to serve.
    pub fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// The scheduler's thread is alive; when that was, in milliseconds as of `now_ms`.
    pub fn heartbeat(&self) -> u64 {
        let now_ms = self.now_ms();
        self.heartbeat_ms.store(now_ms, Ordering::Relaxed);
        now_ms
    }

    /// The model is up. A loss that came first is not forgotten.
    pub fn set_started(&self) {
        self.heartbeat();
        let (old, new) = (STARTING, SERVING);
        let _ = self.phase.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// The executors of a replica are lost and others are on their way; `serving` = those of another one serve.
    pub fn set_executors_failed(&self, serving: bool) {
        self.restart_began_ms.store(self.now_ms(), Ordering::Relaxed);
        if !serving {
            self.phase.store(RESTARTING, Ordering::Release);
        }
    }

    /// The executors of a replica are back.
    pub fn set_executors_restored(&self) {
        let took = self.now_ms().saturating_sub(self.restart_began_ms.load(Ordering::Relaxed));
        self.restart_took_ms.store(took.max(1), Ordering::Relaxed);
        self.phase.store(SERVING, Ordering::Release);
    }

    /// Why the last start of lost executors failed; `None` = there was none, or it succeeded.
    pub fn set_start_failure(&self, failure: Option<StartFailure>) {
        let code = failure.map_or(0, |failure| failure as u8 + 1);
        self.start_failure.store(code, Ordering::Relaxed);
    }

    /// Why lost executors are still not back, as far as their last start tells.
    pub fn start_failure(&self) -> Option<StartFailure> {
        let code = usize::from(self.start_failure.load(Ordering::Relaxed));
        code.checked_sub(1).and_then(|at| StartFailure::ALL.get(at)).copied()
    }

    /// No replica serves.
    pub fn set_unavailable(&self) {
        self.phase.store(UNAVAILABLE, Ordering::Release);
    }

    /// The process stops; there is no way back.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// A step was sent at `sent_ms` and should be answered within `deadline_ms`.
    pub fn step_sent(&self, sent_ms: u64, deadline_ms: u64) {
        self.step_deadline_ms.store(deadline_ms, Ordering::Relaxed);
        self.step_sent_ms.store(sent_ms + 1, Ordering::Relaxed);
    }

    /// No step is unanswered.
    pub fn steps_completed(&self) {
        self.step_sent_ms.store(0, Ordering::Relaxed);
    }

    /// Seconds after which an executor that is away may be back: what its last restart took, 1 to 60.
    pub fn restart_s(&self) -> u32 {
        match self.restart_took_ms.load(Ordering::Relaxed) {
            0 => RESTART_S,
            took_ms => took_ms.div_ceil(1_000).clamp(1, 60) as u32,
        }
    }

    /// The state of this moment.
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
        let late =
            sent > 0 && now.saturating_sub(sent) > self.step_deadline_ms.load(Ordering::Relaxed);
        late || self.is_heartbeat_overdue()
    }

    /// Whether the scheduler's thread has not looked around for too long.
    fn is_heartbeat_overdue(&self) -> bool {
        self.now_ms().saturating_sub(self.heartbeat_ms.load(Ordering::Relaxed)) > STALL_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_status_follows_the_state_table() {
        let health = HealthState::default();
        assert_eq!(health.status(), ServerStatus::Starting);
        health.set_started();
        assert_eq!(health.status(), ServerStatus::Serving);
        health.set_executors_failed(true);
        assert_eq!(health.status(), ServerStatus::Serving);
        health.set_executors_failed(false);
        assert_eq!(health.status(), ServerStatus::Restarting);
        health.set_started(); // Comes too late to matter.
        assert_eq!(health.status(), ServerStatus::Restarting);
        assert_eq!(health.restart_s(), 10, "nothing is known yet");
        assert_eq!(health.start_failure(), None);
        for failure in StartFailure::ALL {
            health.set_start_failure(Some(failure));
            assert_eq!(health.start_failure(), Some(failure));
        }
        health.set_start_failure(None);
        assert_eq!(health.start_failure(), None);
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
