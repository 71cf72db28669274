//! Counters of a KV-event publisher, which the metrics read at each scrape.

use super::feed::QueuedKvEvents;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one publisher. `queue_depth`, `queue_bytes` and `subscribers` are gauges; all other fields
/// only increase.
#[derive(Debug, Default)]
pub struct PublisherCounters {
    /// Number of batches published, including heartbeats.
    pub batches: AtomicU64,
    /// Number of events published.
    pub events: AtomicU64,
    /// Number of batches dropped because the queue was full. A batch with a clear and all blocks replaces the
    /// dropped batches.
    pub dropped: AtomicU64,
    /// Number of replay requests served.
    pub replays: AtomicU64,
    /// Number of replays that became a snapshot because the requested batches had left the ring.
    pub snapshots: AtomicU64,
    /// Number of batches and snapshots sent for replays.
    pub replayed: AtomicU64,
    /// Number of malformed replay requests.
    pub malformed: AtomicU64,
    /// Number of frames that were ignored: subscriptions that do not match the topic, and frames too long to
    /// be kept.
    pub ignored_subscriptions: AtomicU64,
    /// Number of connections closed because there were too many, or because the peer violated the protocol or
    /// was too slow.
    pub rejected_peers: AtomicU64,
    /// Number of connections of the PUB socket, with and without subscriptions.
    pub subscribers: AtomicU64,
    /// Number of batches and snapshots that could not be encoded.
    pub errors: AtomicU64,
    /// Number of batches queued for the publisher thread.
    pub queue_depth: AtomicU64,
    /// Number of bytes queued for the publisher thread.
    pub queue_bytes: AtomicU64,
    /// Sequence number of the last published batch.
    pub seq: AtomicU64,
    /// Epoch of this publisher: the sequence number of its first batch.
    pub epoch: AtomicU64,
}

impl PublisherCounters {
    /// Updates the queue gauges after changes were taken from the queue.
    pub fn record_dequeued(&self, changes: &QueuedKvEvents) {
        self.queue_depth.fetch_sub(1, Ordering::Relaxed);
        self.queue_bytes.fetch_sub(changes.bytes(), Ordering::Relaxed);
    }
}

/// Increases a counter by `by`.
pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
