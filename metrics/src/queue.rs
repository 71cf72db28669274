//! Metric of the time that the request at the head of each replica's queue has waited; it grows while the
//! queue is stuck.

use super::metric_registrar::MetricRegistrar;
use prometheus::{Error, Gauge};
use protocol::Replica;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Metrics of the queue of waiting requests.
pub struct QueueMetrics {
    age: Vec<Gauge>,
    start: Instant,
    /// Milliseconds from `start` to the submission of the request at the head of the queue, plus one; 0 =
    /// empty queue. One entry per replica.
    submitted_ms: Vec<AtomicU64>,
}

impl QueueMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        Ok(Self {
            age: f.gauge_of_replicas("hadron:queue_age_seconds", "Queue time of the request at the head of the queue, 0 if the queue is empty; maximum over the replicas of a series.")?,
            start: Instant::now(),
            submitted_ms: (0..f.replicas()).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Sets the time that the request at the head of a replica's queue has waited; `None` = empty queue.
    pub fn set_head_wait(&self, replica: Replica, waited: Option<Duration>) {
        let Some(submitted_ms) = self.submitted_ms.get(usize::from(replica.0)) else { return };
        let at = waited.map(|waited| self.start.elapsed().saturating_sub(waited));
        submitted_ms.store(at.map_or(0, |at| at.as_millis() as u64 + 1), Ordering::Relaxed);
    }

    pub(super) fn update(&self) {
        let (now, series) = (self.start.elapsed(), self.age.len());
        let age = |submitted_ms: &AtomicU64| {
            let since = submitted_ms.load(Ordering::Relaxed).checked_sub(1);
            since.map_or(Duration::ZERO, |ms| now.saturating_sub(Duration::from_millis(ms)))
        };
        for (engine, gauge) in self.age.iter().enumerate() {
            // If there are fewer series than replicas, the last series includes the remaining replicas.
            let rest = if engine + 1 == series { self.submitted_ms.len() } else { engine + 1 };
            let own = self.submitted_ms.get(engine..rest).unwrap_or_default();
            gauge.set(own.iter().map(age).max().unwrap_or_default().as_secs_f64());
        }
    }
}
