//! Metrics of the KV-event publishers, copied from their counters at each scrape.

use super::metric_registrar::MetricRegistrar;
use crate::kv_events::PublisherCounters;
use prometheus::{Error, Gauge, IntCounter};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Function that selects a counter of a publisher.
type PublisherCounterFn = fn(&PublisherCounters) -> &AtomicU64;

/// Series of the counters of all KV-event publishers; all values are zero if there are no publishers.
pub(super) struct KvEventMetrics {
    counters: Vec<(Vec<IntCounter>, PublisherCounterFn)>,
    queue_depth: Vec<Gauge>,
    seq: Vec<Gauge>,
}

impl KvEventMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        let counters: Vec<(Vec<IntCounter>, PublisherCounterFn)> = vec![
            (f.counter_of_replicas("hadron:kv_events_batches_total", "Batches of KV events published.")?, |counters| &counters.batches),
            (f.counter_of_replicas("hadron:kv_events_published_total", "KV events published.")?, |counters| &counters.events),
            (f.counter_of_replicas("hadron:kv_events_dropped_total", "Batches of KV events dropped because the queue was full.")?, |counters| &counters.dropped),
            (f.counter_of_replicas("hadron:kv_events_replays_total", "Replays of KV events served.")?, |counters| &counters.replays),
            (f.counter_of_replicas("hadron:kv_events_snapshots_total", "Snapshots of the prefix index published.")?, |counters| &counters.snapshots),
            (f.counter_of_replicas("hadron:kv_events_replayed_total", "Batches of KV events and snapshots sent for replays.")?, |counters| &counters.replayed),
        ];
        let queue_depth = f.gauge_of_replicas("hadron:kv_events_queue_depth", "Batches of KV events queued for publication.")?;
        let seq = f.gauge_of_replicas("hadron:kv_events_seq", "Sequence number of the last published batch of KV events; maximum over the replicas of a series.")?;
        Ok(Self { counters, queue_depth, seq })
    }

    /// Updates the series from the counters of each replica's publisher. If there are fewer series than
    /// replicas, the last series includes the remaining replicas: counts are summed, and of the sequence
    /// numbers the maximum is used.
    pub(super) fn update(&self, publishers: &[Arc<PublisherCounters>]) {
        let series = self.queue_depth.len();
        for engine in 0..series {
            let rest = if engine + 1 == series { publishers.len() } else { engine + 1 };
            let Some(own) = publishers.get(engine..rest) else { continue };
            let sum = |of: PublisherCounterFn| -> u64 {
                own.iter().map(|counters| of(counters).load(Ordering::Relaxed)).sum()
            };
            for (counters, total) in &self.counters {
                raise_to(&counters[engine], sum(*total));
            }
            self.queue_depth[engine].set(sum(|counters| &counters.queue_depth) as f64);
            let last = own.iter().map(|counters| counters.seq.load(Ordering::Relaxed)).max();
            self.seq[engine].set(last.unwrap_or(0) as f64);
        }
    }
}

/// Increases a Prometheus counter to `total`, a count that never decreases.
pub(super) fn raise_to(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}
