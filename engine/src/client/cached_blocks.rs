//! Snapshot of a replica's prefix index, which maps block hashes to cached KV blocks.

use protocol::{BlockHash, Replica};
use scheduler::{BlockStats, KvGroupHitStats, Scheduler, SchedulerStats, StateSlotStats};

/// Snapshot of the prefix index of one replica.
#[derive(Debug, Clone)]
pub struct PrefixIndexSnapshot {
    /// Replica that owns the prefix index.
    pub replica: Replica,
    /// Number of tokens per block.
    pub block_tokens: u32,
    /// Number of KV blocks in each state.
    pub blocks: BlockStats,
    /// Number of slots of recurrent state in each state; the pool is empty for models without recurrent state.
    pub state_slots: StateSlotStats,
    /// Tokens of prefix hits that each KV group offered, gave and cut; empty if all layers keep all positions in one
    /// group.
    pub group_hits: Vec<KvGroupHitStats>,
    /// For each KV group, the hashes of the cached blocks that prefix hits can find, in no particular order.
    pub hashes: Vec<Vec<BlockHash>>,
}

impl PrefixIndexSnapshot {
    /// Copies the block hashes of `replica`. This function is called on the scheduler thread between two
    /// steps; all further processing happens on other threads.
    pub fn of(engine: &Scheduler, stats: &SchedulerStats) -> Self {
        let SchedulerStats { replica, blocks, state_slots, .. } = *stats;
        let kv = engine.kv(replica);
        let counts = kv.group_counts();
        let groups = 0..(counts.kept + counts.windowed) as u8;
        let hashes = groups.map(|group| kv.indexed_hashes(group).collect()).collect();
        let group_hits = stats.kv_group_hits_total.clone();
        Self { replica, block_tokens: kv.block_tokens(), blocks, state_slots, group_hits, hashes }
    }
}
