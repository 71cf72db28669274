//! What the simulator reads from inside the engine, besides its effects.

use protocol::{BlockHash, BlockId, Replica};
use scheduler::Engine;
use std::collections::BTreeSet;

/// Whether nobody holds a block and nobody can find it: nothing may read it.
pub(crate) fn is_vacant(engine: &Engine, replica: Replica, block: BlockId) -> bool {
    let kv = engine.kv(replica);
    kv.refs(block) == 0 && !kv.is_findable(block)
}

/// Hashes in a replica's prefix index.
pub(crate) fn indexed(engine: &Engine, replica: Replica) -> BTreeSet<BlockHash> {
    engine.kv(replica).hashes().collect()
}
