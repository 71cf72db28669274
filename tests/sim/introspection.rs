//! Scheduler state that the simulator's checks read in addition to the scheduler's effects.

use protocol::{BlockHash, BlockId, Replica};
use scheduler::Scheduler;
use std::collections::BTreeSet;

/// Whether a block is unreferenced and not in the prefix index, so that no row may read it.
pub(crate) fn is_free(engine: &Scheduler, replica: Replica, block: BlockId) -> bool {
    let kv = engine.kv(replica);
    kv.ref_count(block) == 0 && !kv.is_cached(block)
}

/// Block hashes in a replica's prefix indexes, with the number of their KV group.
pub(crate) fn indexed_hashes(engine: &Scheduler, replica: Replica) -> BTreeSet<(u8, BlockHash)> {
    let (kv, counts) = (engine.kv(replica), engine.kv(replica).group_counts());
    let groups = 0..(counts.kept + counts.windowed) as u8;
    groups.flat_map(|group| kv.indexed_hashes(group).map(move |hash| (group, hash))).collect()
}
