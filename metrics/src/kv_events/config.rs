//! How changes of the prefix index are published.

use std::time::Duration;

/// Sockets, bounds and encoding of the publishers of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct KvEventsConfig {
    /// PUB socket of rank 0.
    pub endpoint: String,
    /// ROUTER socket of rank 0.
    pub replay_endpoint: Option<String>,
    /// Batches kept for replay.
    pub buffer_steps: usize,
    /// Batches that may wait for one slow subscriber.
    pub hwm: i32,
    /// Batches that may wait for the publisher's thread.
    pub max_queue_size: usize,
    /// Bytes that may wait for the publisher's thread, and about as many for one slow subscriber.
    pub max_queue_bytes: u64,
    /// Template of the topic.
    pub topic: String,
    /// Whether the PUB socket waits for subscribers or goes to them.
    pub bind: BindMode,
    /// How events are encoded.
    pub format: KvEventFormat,
    /// Where sequences start.
    pub sequence_start: SequenceStart,
    /// Time without events after which an empty batch is sent; `None` = never.
    pub idle_heartbeat_interval: Option<Duration>,
    /// Whether `token_ids` are sent.
    pub token_ids: bool,
}

/// Whether a socket binds or connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindMode {
    /// Loopback, wildcards, ipc and inproc bind; other hosts are connected to.
    Auto,
    /// Wait for subscribers.
    Bind,
    /// Go to one collector.
    Connect,
}

/// Encoding of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvEventFormat {
    /// Maps, as of vLLM 0.24
    Map,
    /// Arrays whose first element is the tag, as before it
    Array,
}

/// Number of a publisher's first batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceStart {
    /// Its start in microseconds of unix time, so that a restart never counts backwards.
    Clock,
    /// 0, as in vLLM.
    Zero,
}
