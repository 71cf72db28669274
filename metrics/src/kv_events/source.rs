//! Description of a KV-event publisher, as reported at `/kv_event_sources`: endpoints, topic, progress.

use super::config::KvEventsConfig;
use super::publisher_counters::PublisherCounters;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Settings in effect and counters of a KV-event publisher, for `/kv_event_sources` and metrics.
#[derive(Debug)]
pub struct KvEventPublisherInfo {
    /// Configuration of the publishers, as given in the flags.
    pub config: KvEventsConfig,
    /// DP rank of the replica.
    pub rank: u16,
    /// Endpoint of the PUB socket.
    pub endpoint: String,
    /// Whether the PUB socket binds; otherwise it connects to a collector.
    pub binds: bool,
    /// Endpoint of the ROUTER socket.
    pub replay_endpoint: Option<String>,
    /// Topic of the batches.
    pub topic: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Counters of the publisher.
    pub counters: Arc<PublisherCounters>,
}

impl KvEventPublisherInfo {
    /// Returns the entry of `/kv_event_sources`: the configuration in vLLM's terms and additional fields for
    /// subscribers.
    pub fn describe(&self) -> Value {
        let (config, counters) = (&self.config, &self.counters);
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "enable_kv_cache_events": true,
            "data_parallel_rank": self.rank,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "bind": self.binds,
            "replay_endpoint": self.replay_endpoint,
            "topic": self.topic,
            "format": config.format.name(),
            "block_size": self.block_tokens,
            "token_ids": config.token_ids,
            "sequence_start": config.sequence_start.name(),
            "epoch": load(&counters.epoch),
            "last_seq": load(&counters.seq),
            "dropped": load(&counters.dropped),
            "replays": load(&counters.replays),
            "snapshots": load(&counters.snapshots),
            "subscribers": load(&counters.subscribers),
            "ignored_subscriptions": load(&counters.ignored_subscriptions),
            "rejected_peers": load(&counters.rejected_peers),
            "buffer_steps": config.buffer_steps,
            "hwm": config.hwm,
            "max_queue_size": config.max_queue_size,
            "max_queue_bytes": config.max_queue_bytes,
            "idle_beat_s": config.idle_heartbeat_interval.map_or(0.0, |interval| interval.as_secs_f64()),
        })
    }
}
