//! What the simulator reads from inside the engine, besides its effects.

use protocol::{BlockHash, BlockId, Replica};
use scheduler::Scheduler;
use std::collections::BTreeSet;

/// Whether nobody holds a block and nobody can find it: nothing may read it.
pub(crate) fn is_free(engine: &Scheduler, replica: Replica, block: BlockId) -> bool {
    let kv = engine.kv(replica);
    kv.ref_count(block) == 0 && !kv.is_cached(block)
}

/// Hashes in a replica's prefix index.
pub(crate) fn indexed_hashes(engine: &Scheduler, replica: Replica) -> BTreeSet<BlockHash> {
    engine.kv(replica).indexed_hashes().collect()
}
