//! Executor lifecycle metrics: starts, failures, heartbeats.

use super::metric_registrar::{MetricRegistrar, ReplicaOrSharedSeries};
use super::start_failure::RestartFailureKind;
use prometheus::{Error, Gauge, IntCounter};
use protocol::{Rank, Replica};
use scheduler::{ExecutorFailure, SchedulerStats};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Values of the label `cause` of executor failures, in the order of `ExecutorFailure`.
pub(super) const CAUSES: [&str; 4] = ["exited", "silent", "late", "fault"];
const PHASES: [&str; 6] = ["config", "comm", "load", "kv", "graphs", "ready"];

/// Metrics of the executor lifecycle.
pub struct ExecutorLifecycleMetrics {
    restarts: [ReplicaOrSharedSeries<IntCounter>; 4],
    /// Counters of failed starts, in the order of `RestartFailureKind`.
    failed_starts: [ReplicaOrSharedSeries<IntCounter>; 6],
    /// Straggler counters by world rank; `up` and `heartbeat` have the same order.
    stragglers: Vec<IntCounter>,
    up: Vec<Gauge>,
    heartbeat: Vec<Gauge>,
    startup: [Gauge; 6],
    start: Instant,
    /// Milliseconds from `start` to the last heartbeat of each rank.
    last_heartbeat_ms: Vec<AtomicU64>,
    tp_size: usize,
}

impl ExecutorLifecycleMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        Ok(Self {
            restarts: f.counters_of_replicas("hadron:executor_restarts_total", "Failures of the executors of a replica, each followed by a restart, by cause.", "cause", CAUSES)?.map(ReplicaOrSharedSeries::from),
            failed_starts: f.counters_of_replicas("hadron:executor_start_failures_total", "Failed restarts of the executors of a replica, by cause; weights_changed: the weights differ from those of the first start.", "cause", RestartFailureKind::ALL.map(RestartFailureKind::name))?.map(ReplicaOrSharedSeries::from),
            stragglers: f.counter_of_ranks("hadron:late_rank_total", "Steps that a rank (straggler) had not completed by their deadline.")?,
            up: f.gauge_of_ranks("hadron:executor_up", "1 while the executor of a rank is running.")?,
            heartbeat: f.gauge_of_ranks("hadron:heartbeat_age_seconds", "Time since the last heartbeat of the executor of a rank; for an executor in this process, of the scheduler thread.")?,
            startup: f.gauges("hadron:startup_seconds", "Duration of each startup phase; ready = the whole start. comm (joining the other ranks) is 0 for a single rank.", "phase", PHASES)?,
            start: Instant::now(),
            last_heartbeat_ms: (0..f.replicas() * f.tp_size()).map(|_| AtomicU64::new(0)).collect(),
            tp_size: usize::from(f.tp_size()),
        })
    }

    /// Counts a failure of a replica's executors.
    pub fn executors_failed(&self, replica: Replica, failure: ExecutorFailure) {
        self.restarts[failure as usize].of(replica).inc();
    }

    /// Counts a failed restart of a replica's executors.
    pub fn start_failed(&self, replica: Replica, failure: RestartFailureKind) {
        self.failed_starts[failure as usize].of(replica).inc();
    }

    /// Counts a step that a rank had not completed by its deadline.
    pub fn straggler(&self, rank: Rank) {
        if let Some(counter) = self.stragglers.get(usize::from(rank.0)) {
            counter.inc();
        }
    }

    /// Records a heartbeat of a rank.
    pub fn heartbeat(&self, rank: Rank) {
        if let Some(heartbeat_ms) = self.last_heartbeat_ms.get(usize::from(rank.0)) {
            heartbeat_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
        }
    }

    /// Adds the duration of a startup phase to its startup gauge. `name`: the phase, as named by the executor.
    pub fn startup_phase(&self, name: &str, took: Duration) {
        let [_, comm, load, kv, graphs, _] = &self.startup;
        let part = match name {
            "join the other ranks" => comm,
            "allocate the KV cache" => kv,
            "compile kernels" | "warm up" | "capture graphs" => graphs,
            _ => load,
        };
        part.add(took.as_secs_f64());
    }

    /// Sets the startup gauges that belong to no phase. `config`: time to read the configuration; `total`: time
    /// of the whole start.
    pub fn started(&self, config: Duration, total: Duration) {
        let [config_gauge, _, _, _, _, ready] = &self.startup;
        config_gauge.set(config.as_secs_f64());
        ready.set(total.as_secs_f64());
    }

    pub(super) fn update(&self, stats: &[SchedulerStats]) {
        for (rank, up) in self.up.iter().enumerate() {
            let ready = stats.get(rank / self.tp_size).is_some_and(|stats| stats.executors_ready);
            up.set(f64::from(ready));
        }
        let now = self.start.elapsed();
        for (heartbeat, heartbeat_ms) in self.heartbeat.iter().zip(&self.last_heartbeat_ms) {
            let last_heartbeat = Duration::from_millis(heartbeat_ms.load(Ordering::Relaxed));
            heartbeat.set(now.saturating_sub(last_heartbeat).as_secs_f64());
        }
    }
}
