//! Scheduler state that the simulator's checks read in addition to the scheduler's effects.

use protocol::{BlockHash, BlockId, Replica};
use scheduler::Scheduler;
use std::collections::BTreeSet;

/// Whether a block is unreferenced and not in the prefix index, so that no row may read it.
pub(crate) fn is_free(engine: &Scheduler, replica: Replica, block: BlockId) -> bool {
    let kv = engine.kv(replica);
    kv.ref_count(block) == 0 && !kv.is_cached(block)
}

/// Block hash in the prefix index of a KV group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupBlockHash {
    /// Number of the KV group.
    pub(crate) group: u8,
    pub(crate) hash: BlockHash,
}

/// Block hashes in a replica's prefix indexes.
pub(crate) fn indexed_hashes(engine: &Scheduler, replica: Replica) -> BTreeSet<GroupBlockHash> {
    let (kv, counts) = (engine.kv(replica), engine.kv(replica).group_counts());
    let groups = 0..(counts.kept + counts.windowed) as u8;
    let hashes = |group| kv.indexed_hashes(group).map(move |hash| GroupBlockHash { group, hash });
    groups.flat_map(hashes).collect()
}
