//! Checks of the invariants of the KV cache.

use super::KvCache;
use crate::cache_group::CacheGroup;
use crate::{BlockTables, StateSlots};
use protocol::BlockId;

impl KvCache {
    /// Recomputes reference counts, block states and the prefix indexes from `tables`, which must be the tables
    /// of all requests; panics on a difference.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTables>) {
        let mut refs = vec![0; self.pool.blocks() as usize];
        for (group, table) in tables.flat_map(|tables| tables.iter().enumerate()) {
            let released = &table.blocks()[..table.first_held() as usize];
            assert!(released.iter().all(|block| *block == BlockId::NULL), "released entry");
            for block in table.held() {
                refs[block.0 as usize] += 1;
                let metadata = self.block_metadata[block.0 as usize].as_ref();
                assert!(
                    metadata.is_none_or(|m| usize::from(m.group) == group),
                    "{block:?} in the table of group {group} is indexed in another group"
                );
            }
        }
        self.pool.check(&refs, |block| self.is_indexed(BlockId(block)));
        (0..=u8::MAX).zip(&self.groups).for_each(|(number, group)| self.check_index(number, group));
        if let Some(sampler) = &self.lifetime_sampler {
            sampler.check(|block| refs[block as usize] == 0 && !self.is_indexed(BlockId(block)));
        }
        let with_metadata = self.block_metadata.iter().flatten().count();
        let indexed: usize = self.groups.iter().map(|group| group.index.len()).sum();
        assert_eq!(with_metadata, indexed, "metadata and prefix indexes differ");
    }

    /// Recomputes the reference counts of the state slots from `requests`, which must be the slots of all requests;
    /// panics on a difference, or if the block of a checkpoint is not in the prefix index.
    pub fn check_states<'a>(&self, requests: impl Iterator<Item = &'a StateSlots>) {
        let kept = &self.groups[..self.group_counts.kept as usize];
        let is_indexed = |hash| kept.iter().all(|group| group.index.get(hash).is_some());
        self.states.check(requests, is_indexed);
    }

    fn check_index(&self, number: u8, group: &CacheGroup) {
        for (hash, block) in group.index.iter() {
            let metadata = self.block_metadata[block as usize].as_ref();
            let metadata =
                metadata.unwrap_or_else(|| panic!("indexed block {block} has no metadata"));
            assert_eq!(metadata.key.hash, hash, "block {block} is indexed under another hash");
            assert_eq!(metadata.group, number, "block {block} is indexed in another group");
            let parent = metadata.parent.filter(|_| !group.is_window());
            assert!(
                parent.is_none_or(|p| group.index.get(p).is_some()),
                "the parent of block {block} is not indexed"
            );
        }
    }
}
