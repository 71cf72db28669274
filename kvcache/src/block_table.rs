//! Block tables of a request, in order of positions.

use protocol::BlockId;

/// Block table of a request in one KV cache group. It owns one reference to the block of each held entry and
/// is therefore not `Clone`. Only `KvCache` changes block tables.
#[derive(Debug, Default)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    /// Number of leading entries that hold no block ([`BlockId::NULL`]), because their positions are before
    /// the window of the group.
    pub(crate) released: u32,
}

impl BlockTable {
    /// Returns the blocks: entry `i` holds positions `[i * block_tokens, (i + 1) * block_tokens)`. Entries
    /// before the window of the group are [`BlockId::NULL`].
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Returns the held blocks, those of the entries from `first_held` on.
    #[inline]
    pub fn held(&self) -> &[BlockId] {
        &self.blocks[self.released as usize..]
    }

    /// Returns the index of the first entry that holds a block.
    #[inline]
    pub fn first_held(&self) -> u32 {
        self.released
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

/// Block tables of a request, one for each KV cache group. Every non-empty value must be released with
/// `KvCache::free`.
#[derive(Debug, Default)]
pub struct BlockTables {
    pub(crate) tables: Vec<BlockTable>,
}

impl BlockTables {
    /// Returns the table of each group, in order of the groups; none before the first allocation.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &BlockTable> {
        self.tables.iter()
    }

    /// Returns the table of a group.
    #[inline]
    pub fn group(&self, group: usize) -> &BlockTable {
        &self.tables[group]
    }

    /// Returns whether no table has entries.
    pub fn is_empty(&self) -> bool {
        self.tables.iter().all(BlockTable::is_empty)
    }

    /// Creates the tables of all groups, if they do not exist yet.
    #[inline]
    pub(crate) fn ensure_groups(&mut self, groups: usize) {
        if self.tables.len() < groups {
            self.tables.resize_with(groups, BlockTable::default);
        }
    }
}
