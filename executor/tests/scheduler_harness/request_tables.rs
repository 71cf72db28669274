//! Block tables of a request.

use protocol::{BlockId, BlockTableUpdate, KvKind};
use std::ops::Range;

/// Number of positions per KV block.
pub(crate) const BLOCK: usize = 16;

/// Block tables of a request, one for each KV group.
#[derive(Default)]
pub(crate) struct RequestTables {
    pub(super) groups: Vec<GroupTable>,
    /// Whether blocks before the window are kept, because other requests may use them.
    pub(crate) keeps_blocks: bool,
}

/// Block table of a request in one KV group.
#[derive(Clone, Default)]
pub(super) struct GroupTable {
    /// Entries; `None` = no block, because all its positions are before the window.
    pub(super) blocks: Vec<Option<BlockId>>,
    /// Number of entries that the executor has received.
    sent: usize,
}

impl RequestTables {
    /// Returns the tables of a request with a prefix hit of `blocks` blocks in these tables.
    pub(crate) fn prefix(&self, blocks: usize) -> Self {
        let of_group =
            |table: &GroupTable| GroupTable { blocks: table.blocks[..blocks].to_vec(), sent: 0 };
        Self { groups: self.groups.iter().map(of_group).collect(), keeps_blocks: true }
    }

    /// Removes the entries from `at` on and returns them as tables.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let of_group =
            |table: &mut GroupTable| GroupTable { blocks: table.blocks.split_off(at), sent: 0 };
        Self { groups: self.groups.iter_mut().map(of_group).collect(), keeps_blocks: false }
    }

    /// Allocates blocks for a row that writes `positions`, and returns the updates of the tables. Blocks
    /// before the window of the row's first token are freed: other rows of the same step may use them.
    pub(super) fn update(
        &mut self,
        kinds: &[KvKind],
        positions: Range<usize>,
        free: &mut Vec<BlockId>,
    ) -> Vec<BlockTableUpdate> {
        self.groups.resize_with(kinds.len(), GroupTable::default);
        let mut updates = Vec::new();
        for ((group, table), kind) in (0..).zip(&mut self.groups).zip(kinds) {
            let first = kind.first_read(positions.start as u32) as usize / BLOCK;
            if !self.keeps_blocks {
                let behind = first.min(table.blocks.len());
                free.extend(table.blocks[..behind].iter_mut().filter_map(Option::take));
            }
            while table.blocks.len() * BLOCK < positions.end {
                table.blocks.push(Some(free.pop().unwrap()));
            }
            // The first update of a table may leave out the blocks before the window.
            let first_entry = if table.sent == 0 { first } else { table.sent };
            if first_entry < table.blocks.len() {
                let blocks = table.blocks[first_entry..].iter().map(|block| block.unwrap());
                let (first_entry, blocks) = (first_entry as u32, blocks.collect());
                updates.push(BlockTableUpdate { group, first_entry, blocks });
            }
            table.sent = table.blocks.len();
        }
        updates
    }
}
