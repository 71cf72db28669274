//! Lifetime histograms of sampled KV blocks; they exist only with `--kv-cache-metrics`.

use super::histogram_buckets::HistogramFamily;
use super::metric_registrar::{MetricRegistrar, ReplicaOrSharedSeries};
use prometheus::{Error, Histogram};
use protocol::Replica;
use scheduler::BlockLifetime;

/// Lifetime histograms of sampled KV blocks, which the scheduler thread observes at eviction.
pub struct BlockLifetimeMetrics {
    lifetime: ReplicaOrSharedSeries<Histogram>,
    idle: ReplicaOrSharedSeries<Histogram>,
    gap: ReplicaOrSharedSeries<Histogram>,
}

impl BlockLifetimeMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        let histogram = |name, help| f.histogram_of_replicas(name, help, HistogramFamily::KvCacheResidency);
        Ok(Self {
            lifetime: histogram("vllm:kv_block_lifetime_seconds", "Lifetime of a sampled KV block, from allocation to eviction.")?,
            idle: histogram("vllm:kv_block_idle_before_evict_seconds", "Time from the last prefix hit of a sampled KV block (or its allocation, if it had none) to its eviction.")?,
            gap: histogram("vllm:kv_block_reuse_gap_seconds", "Time gaps between the last four accesses of a sampled KV block, observed at its eviction.")?,
        })
    }

    /// Records the lifetimes of sampled blocks that a replica evicted.
    pub fn evicted(&self, replica: Replica, lifetimes: &[BlockLifetime]) {
        let [lifetime, idle, gap] = [&self.lifetime, &self.idle, &self.gap].map(|h| h.of(replica));
        for block in lifetimes {
            lifetime.observe(seconds(block.lifetime_ms));
            idle.observe(seconds(block.idle_ms));
            block.reuse_gaps_ms.iter().for_each(|&gap_ms| gap.observe(seconds(gap_ms)));
        }
    }
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}
