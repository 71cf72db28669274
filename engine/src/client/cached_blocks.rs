//! What the prefix index of a replica holds.

use protocol::{BlockHash, Replica};
use scheduler::{BlockStats, Scheduler};

/// The index of one replica, as of one moment.
#[derive(Debug, Clone)]
pub struct CachedBlocks {
    /// Whose.
    pub replica: Replica,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Blocks by state.
    pub blocks: BlockStats,
    /// Hashes of the findable blocks, in no order.
    pub hashes: Vec<BlockHash>,
}

impl CachedBlocks {
    /// Copies them: the one thing that must happen between two steps.
    pub fn of(engine: &Scheduler, replica: Replica, blocks: BlockStats) -> Self {
        let kv = engine.kv(replica);
        let hashes = kv.indexed_hashes().collect();
        Self { replica, block_tokens: kv.block_tokens(), blocks, hashes }
    }
}
