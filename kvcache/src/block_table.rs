//! The blocks one request holds, in order of position.

use protocol::BlockId;

/// A block table. It owns one reference per entry, so it is not `Clone`; only `KvCache` changes it,
/// and it must be given back with `KvCache::free`.
#[derive(Debug, Default)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
}

impl BlockTable {
    /// Entry `i` holds positions `[i * block_tokens, (i + 1) * block_tokens)`.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Entries.
    #[inline]
    pub fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}
