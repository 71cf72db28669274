//! Registration of full blocks in the prefix index.

use super::{KvCache, PrefixCacheInsertOutcome, SequenceContent};
use crate::block_pool::EvictionOrder;
use crate::cache_group::CacheGroup;
use crate::{BlockKey, BlockTables, ExtraKeys};
use protocol::{BlockHash, BlockId, KvEvent, Token};
use std::sync::Arc;

/// Identity of a block in a prefix index, except for its token ids.
#[derive(Debug)]
pub(super) struct BlockIdentity {
    pub(super) group: u8,
    pub(super) key: BlockKey,
    pub(super) parent: Option<BlockHash>,
    pub(super) extra: Option<Arc<ExtraKeys>>,
}

impl KvCache {
    /// Registers full block `index` of the table of `group` in the prefix index of the group; it contains block
    /// `index` of `content`. The table must hold the block, and its KV must be computed. The blocks of a table
    /// must be registered in order.
    ///
    /// In a window group, `Rejected` applies to this block only, because such a block is indexed without the
    /// preceding block.
    pub fn publish(
        &mut self,
        tables: &mut BlockTables,
        group: u8,
        index: u32,
        content: SequenceContent<'_>,
    ) -> PrefixCacheInsertOutcome {
        let key = content.block_keys[index as usize];
        let CacheGroup { index: prefix_index, .. } = &self.groups[usize::from(group)];
        let table = &mut tables.tables[usize::from(group)];
        let allocated = table.blocks[index as usize].0;
        let parent = (index > 0).then(|| content.block_keys[index as usize - 1].hash);
        let needs_parent = index > 0 && !self.groups[usize::from(group)].is_window();
        if needs_parent && !self.is_indexed(table.blocks[index as usize - 1]) {
            return PrefixCacheInsertOutcome::Rejected;
        }
        match prefix_index.get(key.hash) {
            Some(found) if found == allocated => PrefixCacheInsertOutcome::Stored,
            Some(found) if self.matches_block(found, index, content) => {
                table.blocks[index as usize] = BlockId(found);
                self.deduplicate(allocated, found);
                PrefixCacheInsertOutcome::Deduplicated
            }
            Some(_) => PrefixCacheInsertOutcome::Rejected,
            None => {
                let extra = content.extra_keys.cloned();
                let identity = BlockIdentity { group, key, parent, extra };
                self.insert_in_index(allocated, identity, index, content);
                PrefixCacheInsertOutcome::Stored
            }
        }
    }

    /// Replaces a reference to the block `allocated` by one to the indexed block `found` with equal content.
    fn deduplicate(&mut self, allocated: u32, found: u32) {
        self.pool.pin(found);
        self.release(allocated, EvictionOrder::Last);
        if let Some(sampler) = &mut self.lifetime_sampler {
            sampler.on_used(found);
        }
    }

    pub(super) fn is_indexed(&self, block: BlockId) -> bool {
        self.block_metadata[block.0 as usize].is_some()
    }

    fn insert_in_index(
        &mut self,
        block: u32,
        metadata: BlockIdentity,
        index: u32,
        content: SequenceContent<'_>,
    ) {
        assert!(!self.is_indexed(BlockId(block)), "block {block} is published twice");
        assert_eq!(
            self.pool.ref_count(block),
            1,
            "published block {block} is referenced by several tables"
        );
        let ids = self.tokens_of_content(content, index);
        if self.record_events {
            self.record_stored_event(&metadata, index, ids);
        }
        let first = block as usize * self.block_tokens as usize;
        self.cached_tokens[first..first + ids.len()].copy_from_slice(ids);
        self.groups[usize::from(metadata.group)].index.insert(metadata.key.hash, block);
        self.block_metadata[block as usize] = Some(metadata);
        self.published_blocks += 1;
    }

    /// Adds a newly registered block to the last KV event if the block directly follows the last block of
    /// that event; otherwise starts a new event.
    fn record_stored_event(&mut self, metadata: &BlockIdentity, index: u32, ids: &[Token]) {
        let extra = metadata.extra.as_ref().map_or_else(Vec::new, |extra| extra.for_block(index));
        if let Some(KvEvent::Stored { hashes, tokens, extra_keys, group, .. }) =
            self.events.last_mut()
            && *group == metadata.group
            && hashes.last().copied() == metadata.parent
        {
            hashes.push(metadata.key.hash);
            tokens.extend(ids);
            extra_keys.push(extra);
            return;
        }
        self.events.push(KvEvent::Stored {
            hashes: vec![metadata.key.hash],
            parent: metadata.parent,
            tokens: ids.to_vec(),
            extra_keys: vec![extra],
            group: metadata.group,
        });
    }
}
