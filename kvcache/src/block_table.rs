//! Block table of a request, in order of positions.

use protocol::BlockId;

/// Block table of a request. It owns one reference to the block of each entry and is therefore not `Clone`.
/// Only `KvCache` changes block tables, and every table must be released with `KvCache::free`.
#[derive(Debug, Default)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
}

impl BlockTable {
    /// Returns the blocks: entry `i` holds positions `[i * block_tokens, (i + 1) * block_tokens)`.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Returns the number of entries.
    #[inline]
    pub fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Returns whether the table has no entries.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}
