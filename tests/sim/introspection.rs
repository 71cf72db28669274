//! Scheduler state that the simulator's checks read in addition to the scheduler's effects.

use protocol::{BlockHash, BlockId, Replica};
use scheduler::Scheduler;
use std::collections::BTreeSet;

/// Whether a block is unreferenced and not in the prefix index, so that no row may read it.
pub(crate) fn is_free(engine: &Scheduler, replica: Replica, block: BlockId) -> bool {
    let kv = engine.kv(replica);
    kv.ref_count(block) == 0 && !kv.is_cached(block)
}

/// Block hashes in a replica's prefix index.
pub(crate) fn indexed_hashes(engine: &Scheduler, replica: Replica) -> BTreeSet<BlockHash> {
    engine.kv(replica).indexed_hashes().collect()
}
