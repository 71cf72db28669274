//! Figures of the executor's life: starts, losses, signs of life.

use super::families::Families;
use prometheus::{Error, Gauge, IntCounter};
use scheduler::StepStats;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Why an executor was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Its process or thread ended, or its link closed.
    Exited,
    /// It gave no sign of life.
    Silent,
    /// It gave signs of life, but did not answer a step.
    Late,
    /// It said that it failed.
    Fault,
}

const CAUSES: [&str; 4] = ["exited", "silent", "late", "fault"];
const PHASES: [&str; 5] = ["config", "load", "kv", "graphs", "ready"];

/// Series of the executor's life.
pub struct LifeMetrics {
    restarts: [IntCounter; 4],
    late: [IntCounter; 1],
    up: [Gauge; 1],
    heartbeat: [Gauge; 1],
    startup: [Gauge; 5],
    start: Instant,
    /// Milliseconds from `start` to the last sign of life.
    alive_ms: AtomicU64,
}

impl LifeMetrics {
    #[rustfmt::skip] // A table.
    pub(super) fn new(f: &Families<'_>) -> Result<Self, Error> {
        Ok(Self {
            restarts: f.counters("hadron:executor_restarts_total", "Executors that were lost and started again, by the cause.", "cause", CAUSES)?,
            late: f.counters("hadron:late_rank_total", "Steps that a rank had not answered by their deadline.", "rank", ["0"])?,
            up: f.gauges("hadron:executor_up", "1 while the executor of a rank is there.", "rank", ["0"])?,
            heartbeat: f.gauges("hadron:heartbeat_age_seconds", "Time since the executor of a rank gave a sign of life; of one in this process, since the scheduler's thread did.", "rank", ["0"])?,
            startup: f.gauges("hadron:startup_seconds", "Time of each part of the start; ready is the whole of it.", "phase", PHASES)?,
            start: Instant::now(),
            alive_ms: AtomicU64::new(0),
        })
    }

    /// An executor was lost.
    pub fn lost(&self, loss: Loss) {
        self.restarts[loss as usize].inc();
    }

    /// A step has passed its deadline.
    pub fn late(&self) {
        self.late[0].inc();
    }

    /// The executor gave a sign of life.
    pub fn alive(&self) {
        self.alive_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// The server is up: the parts of its start as the executor named them, the time that reading the
    /// configuration took, and the whole time.
    pub fn started(&self, parts: &[(&'static str, Duration)], config: Duration, whole: Duration) {
        let [of_config, load, kv, graphs, ready] = &self.startup;
        of_config.set(config.as_secs_f64());
        ready.set(whole.as_secs_f64());
        for (name, took) in parts {
            let part = match *name {
                "allocate the KV cache" => kv,
                "compile kernels" | "warm up" | "capture graphs" => graphs,
                _ => load,
            };
            part.add(took.as_secs_f64());
        }
    }

    pub(super) fn set(&self, stats: &[StepStats]) {
        let up = stats.first().is_some_and(|stats| stats.ready);
        self.up[0].set(f64::from(up));
        let alive = Duration::from_millis(self.alive_ms.load(Ordering::Relaxed));
        self.heartbeat[0].set(self.start.elapsed().saturating_sub(alive).as_secs_f64());
    }
}
