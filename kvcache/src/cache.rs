//! The KV cache of one replica: block tables over a pool, and the index of full blocks.
//!
//! A block is published once its KV is computed, never before, and only if its parent is; so every
//! indexed block's parent is indexed, and tables freed tail first are evicted leaf first. A hash
//! leads to one block: a table that computed the same content adopts the indexed one.

use crate::block_lifetime::LifetimeSampler;
use crate::block_pool::{AllocatedBlock, BlockPool};
use crate::prefix_index::PrefixIndex;
use crate::{
    BlockKey, BlockLifetime, BlockTable, ExtraKeys, FaultInjection, InjectedFault, KvConfig,
    KvConfigError,
};
use protocol::{BlockHash, BlockId, KvEvent, Token};
use std::sync::Arc;

/// The KV group whose table all groups of kind `Full` share.
const FULL_ATTENTION_GROUP: u8 = 0;

/// Blocks, tables and prefixes of one replica.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    index: PrefixIndex,
    /// What each indexed block holds; `None` = not findable.
    block_metadata: Vec<Option<BlockMetadata>>,
    /// Ids in each indexed block, `block_tokens` per block.
    cached_tokens: Vec<Token>,
    block_tokens: u32,
    caching: bool,
    record_events: bool,
    events: Vec<KvEvent>,
    published_blocks: u64,
    lifetime_sampler: Option<Box<LifetimeSampler>>,
    fault_injection: FaultInjection,
}

/// Identity of an indexed block, apart from its ids.
#[derive(Debug)]
struct BlockMetadata {
    key: BlockKey,
    parent: Option<BlockHash>,
    extra: Option<Arc<ExtraKeys>>,
}

/// What a request's blocks hold.
#[derive(Debug, Clone, Copy)]
pub struct SequenceContent<'a> {
    /// Ids from position 0.
    pub tokens: &'a [Token],
    /// Keys of its full blocks; missing ones at the end count as not full.
    pub block_keys: &'a [BlockKey],
    /// What else it depends on.
    pub extra_keys: Option<&'a Arc<ExtraKeys>>,
}

/// Result of a prefix lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixHit {
    /// Leading blocks found.
    pub blocks: u32,
    /// Of these, blocks that nobody holds: claiming them uses up free blocks.
    pub evictable: u32,
}

/// Result of publishing one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The block is findable now.
    Stored,
    /// An equal block was findable already and has taken its place in the table.
    Deduplicated,
    /// Its parent is not findable, or another block has its hash: publish no more of this table.
    Rejected,
}

/// Blocks by state; vacant + cached + in use = pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Blocks in all.
    pub pool: u32,
    /// Held by nobody and not findable.
    pub free: u32,
    /// Held by nobody and findable.
    pub cached: u32,
    /// Held by tables.
    pub in_use: u32,
}

impl KvCache {
    /// An empty cache.
    ///
    /// Errors: a pool, block or hash of size zero, or a layout without groups.
    pub fn new(config: &KvConfig) -> Result<Self, KvConfigError> {
        config.validate()?;
        let (blocks, block_tokens) = (config.blocks, config.spec.block_tokens);
        let sampled = config.lifetime_sample.filter(|_| config.caching);
        Ok(Self {
            pool: BlockPool::new(blocks, config.fault_injection),
            index: PrefixIndex::new(blocks, config.guard_key[0]),
            block_metadata: (0..blocks).map(|_| None).collect(),
            cached_tokens: vec![0; blocks as usize * block_tokens as usize],
            block_tokens,
            caching: config.caching,
            record_events: config.events,
            events: Vec::new(),
            published_blocks: 0,
            lifetime_sampler: sampled.map(|share| Box::new(LifetimeSampler::new(share, blocks))),
            fault_injection: config.fault_injection,
        })
    }

    /// Tokens per block.
    #[inline]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks that hold `tokens` positions: `ceil(tokens / block_tokens)`.
    #[inline]
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    /// Whether full blocks become findable.
    #[inline]
    pub fn is_caching(&self) -> bool {
        self.caching
    }

    /// The bug in force in this build, if any.
    #[inline]
    pub fn fault_injection(&self) -> FaultInjection {
        self.fault_injection
    }

    /// Blocks that can be taken: vacant ones and cached idle ones.
    #[inline]
    pub fn available_blocks(&self) -> u32 {
        self.pool.free_count() + self.pool.cached_count()
    }

    /// Blocks by state.
    pub fn counts(&self) -> BlockCounts {
        let (pool, vacant, cached) =
            (self.pool.blocks(), self.pool.free_count(), self.pool.cached_count());
        let in_use = pool.checked_sub(vacant + cached).expect("free blocks are part of the pool");
        BlockCounts { pool, free: vacant, cached, in_use }
    }

    /// Findable blocks that nobody holds, in the order in which they would be evicted.
    pub fn evictable_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.pool.evictable().map(BlockId)
    }

    /// Blocks that became findable since the start; a waiting request's hit can only have grown by these.
    #[inline]
    pub fn published_blocks(&self) -> u64 {
        self.published_blocks
    }

    /// Tables that hold a block.
    #[inline]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block.0)
    }

    /// Whether a prefix hit may find a block.
    #[inline]
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.is_indexed(block)
    }

    /// The hashes under which blocks can be found, in no particular order.
    pub fn indexed_hashes(&self) -> impl Iterator<Item = BlockHash> {
        self.index.iter().map(|(hash, _)| hash)
    }

    /// Appends the longest findable prefix of `content` to `found`. The last token is never part of
    /// it: at least one is left to forward.
    ///
    /// A block matches only if hash, ids, extra keys and guard are equal. Nothing is pinned:
    /// `claim` must come before anything else is taken.
    pub fn match_prefix(
        &self,
        content: SequenceContent<'_>,
        found: &mut Vec<BlockId>,
    ) -> PrefixHit {
        let keep = u32::from(!self.fault_injection.is_active(InjectedFault::LastTokenFromCache));
        let longest = (content.tokens.len() as u32).saturating_sub(keep) / self.block_tokens;
        let mut hit = PrefixHit::default();
        if !self.caching {
            return hit;
        }
        for key in content.block_keys.iter().take(longest as usize) {
            let Some(block) = self.index.get(key.hash) else { break };
            if !self.matches_block(block, hit.blocks, content) {
                break;
            }
            hit.blocks += 1;
            hit.evictable += u32::from(self.pool.ref_count(block) == 0);
            found.push(BlockId(block));
        }
        hit
    }

    /// Whether indexed `block` is block `index` of `content`, beyond the equality of hashes.
    fn matches_block(&self, block: u32, index: u32, content: SequenceContent<'_>) -> bool {
        if self.fault_injection.is_active(InjectedFault::HashGuardIgnored) {
            return true;
        }
        let label =
            self.block_metadata[block as usize].as_ref().expect("an indexed block has a label");
        label.key.guard == content.block_keys[index as usize].guard
            && self.tokens_of_block(block) == self.tokens_of_content(content, index)
            && (self.fault_injection.is_active(InjectedFault::SaltIgnored)
                || self.same_extra_keys(label, index, content))
    }

    fn same_extra_keys(
        &self,
        label: &BlockMetadata,
        index: u32,
        content: SequenceContent<'_>,
    ) -> bool {
        let (own, other) = (label.extra.as_deref(), content.extra_keys.map(Arc::as_ref));
        ExtraKeys::same_in_block(own, other, index, self.block_tokens)
    }

    fn tokens_of_block(&self, block: u32) -> &[Token] {
        let first = block as usize * self.block_tokens as usize;
        &self.cached_tokens[first..first + self.block_tokens as usize]
    }

    fn tokens_of_content<'a>(&self, content: SequenceContent<'a>, index: u32) -> &'a [Token] {
        let first = index as usize * self.block_tokens as usize;
        &content.tokens[first..first + self.block_tokens as usize]
    }

    /// Appends found blocks to a table and keeps them from eviction.
    pub fn pin(&mut self, table: &mut BlockTable, found: &[BlockId]) {
        for &block in found {
            self.pool.pin(block.0);
            table.blocks.push(block);
        }
        if let Some(residency) = &mut self.lifetime_sampler {
            for block in found {
                residency.on_used(block.0);
            }
        }
    }

    /// Appends `count` blocks to a table, evicting the longest idle ones if none is vacant. The caller
    /// has seen `available() >= count`.
    pub fn allocate(&mut self, table: &mut BlockTable, count: u32) {
        for _ in 0..count {
            let AllocatedBlock { block, evicted } = self.pool.allocate();
            if evicted {
                self.evict(block);
            }
            if let Some(residency) = &mut self.lifetime_sampler {
                residency.on_allocated(block);
            }
            table.blocks.push(BlockId(block));
        }
    }

    fn evict(&mut self, block: u32) {
        let label = self.block_metadata[block as usize].take().expect("a cached block has a label");
        self.index.remove(label.key.hash, block);
        if let Some(residency) = &mut self.lifetime_sampler {
            residency.on_evicted(block);
        }
        if !self.record_events
            || self.fault_injection.is_active(InjectedFault::EvictionWithoutEvent)
        {
            return;
        }
        match self.events.last_mut() {
            Some(KvEvent::Removed { hashes, .. }) => hashes.push(label.key.hash),
            _ => self.events.push(KvEvent::Removed {
                hashes: vec![label.key.hash],
                group: FULL_ATTENTION_GROUP,
            }),
        }
    }

    /// Makes full block `index` of a table findable as block `index` of `content`, whose KV must be
    /// computed. Blocks are published in order.
    pub fn publish(
        &mut self,
        table: &mut BlockTable,
        index: u32,
        content: SequenceContent<'_>,
    ) -> PublishOutcome {
        let key = content.block_keys[index as usize];
        let own = table.blocks[index as usize].0;
        let parent = (index > 0).then(|| content.block_keys[index as usize - 1].hash);
        if index > 0 && !self.is_indexed(table.blocks[index as usize - 1]) {
            return PublishOutcome::Rejected;
        }
        match self.index.get(key.hash) {
            Some(found) if found == own => PublishOutcome::Stored,
            Some(found) if self.matches_block(found, index, content) => {
                self.pool.pin(found);
                self.release(own);
                if let Some(residency) = &mut self.lifetime_sampler {
                    residency.on_used(found);
                }
                table.blocks[index as usize] = BlockId(found);
                PublishOutcome::Deduplicated
            }
            Some(_) => PublishOutcome::Rejected,
            None => {
                self.insert_in_index(
                    own,
                    BlockMetadata { key, parent, extra: content.extra_keys.cloned() },
                    index,
                    content,
                );
                PublishOutcome::Stored
            }
        }
    }

    fn is_indexed(&self, block: BlockId) -> bool {
        self.block_metadata[block.0 as usize].is_some()
    }

    fn insert_in_index(
        &mut self,
        block: u32,
        label: BlockMetadata,
        index: u32,
        content: SequenceContent<'_>,
    ) {
        assert!(!self.is_indexed(BlockId(block)), "block {block} is published twice");
        assert_eq!(
            self.pool.ref_count(block),
            1,
            "block {block} was written by one of several holders"
        );
        let ids = self.tokens_of_content(content, index);
        if self.record_events {
            self.record_stored_event(&label, index, ids);
        }
        let first = block as usize * self.block_tokens as usize;
        self.cached_tokens[first..first + ids.len()].copy_from_slice(ids);
        self.index.insert(label.key.hash, block);
        self.block_metadata[block as usize] = Some(label);
        self.published_blocks += 1;
    }

    /// Adds a block to the run it continues, or starts a run.
    fn record_stored_event(&mut self, label: &BlockMetadata, index: u32, ids: &[Token]) {
        let extra = label.extra.as_ref().map_or_else(Vec::new, |extra| extra.for_block(index));
        if let Some(KvEvent::Stored { hashes, tokens, extra_keys, .. }) = self.events.last_mut()
            && hashes.last().copied() == label.parent
        {
            hashes.push(label.key.hash);
            tokens.extend(ids);
            extra_keys.push(extra);
            return;
        }
        self.events.push(KvEvent::Stored {
            hashes: vec![label.key.hash],
            parent: label.parent,
            tokens: ids.to_vec(),
            extra_keys: vec![extra],
            group: FULL_ATTENTION_GROUP,
        });
    }

    fn release(&mut self, block: u32) {
        let findable = self.block_metadata[block as usize].is_some();
        self.pool.release(block, findable);
        if let Some(residency) = self.lifetime_sampler.as_mut().filter(|_| !findable)
            && self.pool.ref_count(block) == 0
        {
            residency.forget(block);
        }
    }

    /// Gives a table's blocks back, tail first; published ones stay findable.
    pub fn free(&mut self, table: &mut BlockTable) {
        while let Some(block) = table.blocks.pop() {
            self.release(block.0);
        }
    }

    /// Loses one block of a table for ever, as a forgotten release would.
    #[cfg(feature = "planted")]
    pub fn leak_block(&mut self, table: &mut BlockTable) {
        table.blocks.pop();
    }

    /// Forgets every prefix. Tables keep their blocks.
    pub fn clear(&mut self) {
        self.index.clear();
        self.block_metadata.iter_mut().for_each(|label| *label = None);
        if let Some(residency) = &mut self.lifetime_sampler {
            self.pool.evictable().for_each(|block| residency.forget(block));
        }
        self.pool.free_all_cached();
        if self.record_events {
            self.events.push(KvEvent::Cleared);
        }
    }

    /// Whether `take_events` would return something.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Changes of the index since the last call, in order.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Tells what time it is, in milliseconds since any moment; only stays are measured by it.
    #[inline]
    pub fn set_time(&mut self, now_ms: u64) {
        if let Some(residency) = &mut self.lifetime_sampler {
            residency.set_time(now_ms);
        }
    }

    /// Whether `take_lifetimes` would return something.
    #[inline]
    pub fn has_lifetimes(&self) -> bool {
        self.lifetime_sampler.as_ref().is_some_and(|residency| residency.has_lifetimes())
    }

    /// Stays of sampled blocks that were evicted since the last call, in order.
    pub fn take_lifetimes(&mut self) -> Vec<BlockLifetime> {
        self.lifetime_sampler.as_mut().map_or_else(Vec::new, |residency| residency.take_lifetimes())
    }

    /// Recomputes everything from `tables`, which must be all there are; panics on a difference.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut refs = vec![0; self.pool.blocks() as usize];
        for block in tables.flat_map(BlockTable::blocks) {
            refs[block.0 as usize] += 1;
        }
        self.pool.check(&refs, |block| self.is_indexed(BlockId(block)));
        for (hash, block) in self.index.iter() {
            let label = self.block_metadata[block as usize].as_ref();
            let label = label.unwrap_or_else(|| panic!("indexed block {block} has no label"));
            assert_eq!(label.key.hash, hash, "block {block} is indexed under another hash");
            let parent = label.parent;
            assert!(parent.is_none_or(|p| self.index.get(p).is_some()), "{block} has no parent");
        }
        if let Some(residency) = &self.lifetime_sampler {
            residency.check(|block| refs[block as usize] == 0 && !self.is_indexed(BlockId(block)));
        }
        let labelled = self.block_metadata.iter().flatten().count();
        assert_eq!(labelled, self.index.len(), "labels and index differ");
    }
}
