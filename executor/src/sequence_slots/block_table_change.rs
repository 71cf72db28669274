//! Block table changes of batch rows.

use protocol::BlockTableUpdate;

/// Change of the block table of one KV group by one row: the entries from index `from` on are replaced.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockTableChange {
    /// Index of the first replaced entry.
    pub(crate) from: usize,
    /// New entries, up to the end of the block table.
    pub(crate) blocks: Vec<i32>,
}

impl BlockTableChange {
    /// Adds another block table update of the same row. The update replaces the entries that it overlaps. The ids of
    /// successive blocks differ by `step` in the table.
    pub(super) fn add(&mut self, update: &BlockTableUpdate, step: usize) {
        let from = update.first_entry as usize;
        if from < self.from || self.blocks.is_empty() {
            self.blocks.clear();
            self.from = from;
        }
        self.blocks.truncate(from - self.from);
        self.blocks.extend(update.blocks.iter().map(|block| (block.0 as usize * step) as i32));
    }
}
