//! What a publisher counts, for whoever renders it.

use super::feed::KvEventChanges;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one publisher; all grow, but for those of the queue and `subscribers`.
#[derive(Debug, Default)]
pub struct PublisherCounters {
    /// Batches published, beats included.
    pub batches: AtomicU64,
    /// Events published.
    pub events: AtomicU64,
    /// Batches lost because the publisher's thread did not keep up; a clear and a listing follow.
    pub dropped: AtomicU64,
    /// Replay requests answered.
    pub replays: AtomicU64,
    /// Of these, by a snapshot: the ring no longer held what was asked for.
    pub snapshots: AtomicU64,
    /// Batches and snapshots sent again.
    pub replayed: AtomicU64,
    /// Replay requests of no known shape.
    pub malformed: AtomicU64,
    /// Subscriptions and other frames of subscribers that match no batch: they are not kept.
    pub ignored_subscriptions: AtomicU64,
    /// Connections closed because there were too many, or because the peer broke the protocol or was too late.
    pub rejected_peers: AtomicU64,
    /// Connections of the PUB socket.
    pub subscribers: AtomicU64,
    /// Messages that could not be encoded.
    pub errors: AtomicU64,
    /// Batches that wait for the publisher's thread.
    pub queue_depth: AtomicU64,
    /// Bytes that they take.
    pub queue_bytes: AtomicU64,
    /// Number of the last batch published.
    pub seq: AtomicU64,
    /// Number of the first batch of this publisher.
    pub epoch: AtomicU64,
}

impl PublisherCounters {
    /// Changes were taken from the queue.
    pub fn record_dequeued(&self, changes: &KvEventChanges) {
        self.queue_depth.fetch_sub(1, Ordering::Relaxed);
        self.queue_bytes.fetch_sub(changes.bytes(), Ordering::Relaxed);
    }
}

/// Adds to a counter.
pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
