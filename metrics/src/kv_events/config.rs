//! Configuration of the KV-event publishers.

use std::time::Duration;

/// Endpoints, limits and encoding of the KV-event publishers of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct KvEventsConfig {
    /// Endpoint of the PUB socket of DP rank 0.
    pub endpoint: String,
    /// Endpoint of the ROUTER socket of DP rank 0, which serves replay requests; `None` = no replays.
    pub replay_endpoint: Option<String>,
    /// Number of published batches that are kept for replay requests.
    pub buffer_steps: usize,
    /// High-water mark: maximum number of batches queued for a slow subscriber; 0 = limited by bytes only.
    pub hwm: i32,
    /// Maximum number of batches queued for the publisher thread.
    pub max_queue_size: usize,
    /// Maximum number of bytes queued for the publisher thread and, approximately, for a slow subscriber.
    pub max_queue_bytes: u64,
    /// Template of the topic, with the placeholders of `TopicFields`.
    pub topic: String,
    /// Whether the PUB socket binds or connects.
    pub bind: BindMode,
    /// Encoding of the events in a batch.
    pub format: KvEventFormat,
    /// Rule for the sequence number of the first batch.
    pub sequence_start: InitialSequenceNumber,
    /// Idle time after which an empty batch is sent as a heartbeat; `None` = never.
    pub idle_heartbeat_interval: Option<Duration>,
    /// Whether events include `token_ids`.
    pub token_ids: bool,
}

/// Whether the PUB socket binds to its endpoint or connects to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindMode {
    /// The socket binds to loopback, wildcard and ipc endpoints, and connects to other hosts.
    Auto,
    /// The socket binds and accepts subscribers.
    Bind,
    /// The socket connects to one collector.
    Connect,
}

/// Encoding of KV events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvEventFormat {
    /// MessagePack maps, as in vLLM 0.24 and later.
    Map,
    /// MessagePack arrays with the tag as the first element, as before vLLM 0.24.
    Array,
}

impl KvEventFormat {
    /// Name of the encoding in replies of `/kv_event_sources`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Array => "array",
        }
    }
}

/// Sequence number of a publisher's first batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialSequenceNumber {
    /// Start time in microseconds of Unix time, so that numbers do not decrease after a restart.
    Clock,
    /// The first batch has the number 0, as in vLLM.
    Zero,
}

impl InitialSequenceNumber {
    /// Name of the setting's value in replies of `/kv_event_sources`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Clock => "clock",
            Self::Zero => "zero",
        }
    }
}
