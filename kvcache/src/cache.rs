//! KV cache of one replica: a block pool and the prefix index of full blocks.
//!
//! `publish` registers a full block in the prefix index ("indexed") after its KV is computed, and only if its
//! parent (the preceding block of the sequence) is indexed. Therefore the parent of every indexed block is
//! indexed. Block tables are freed last block first, so blocks without children are evicted first. A hash
//! maps to a single block: if a request computes a block with equal content, the block's entry in the
//! request's block table is replaced by the indexed block (deduplication).

use crate::block_lifetime::LifetimeSampler;
use crate::block_pool::{AllocatedBlock, BlockPool};
use crate::prefix_index::PrefixIndex;
use crate::{BlockKey, BlockLifetime, BlockTable, ExtraKeys, KvConfig, KvConfigError};
use protocol::{BlockHash, BlockId, KvEvent, Token};
use std::sync::Arc;

/// Index of the KV cache group in KV events. All groups of kind `Full` share one block table and are reported
/// as this group.
const FULL_ATTENTION_GROUP: u8 = 0;

/// Block pool, prefix index and events of one replica.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    index: PrefixIndex,
    /// For each block of the pool: its metadata if the block is in the prefix index, otherwise `None`.
    block_metadata: Vec<Option<BlockIdentity>>,
    /// Token ids of the blocks in the prefix index, `block_tokens` ids per block of the pool.
    cached_tokens: Vec<Token>,
    block_tokens: u32,
    caching: bool,
    record_events: bool,
    events: Vec<KvEvent>,
    published_blocks: u64,
    lifetime_sampler: Option<Box<LifetimeSampler>>,
}

/// Identity of a block in the prefix index, except for its token ids.
#[derive(Debug)]
struct BlockIdentity {
    key: BlockKey,
    parent: Option<BlockHash>,
    extra: Option<Arc<ExtraKeys>>,
}

/// Token ids and keys that identify the content of a request's blocks.
#[derive(Debug, Clone, Copy)]
pub struct SequenceContent<'a> {
    /// Token ids from position 0.
    pub tokens: &'a [Token],
    /// Keys of the full blocks; full blocks without a key are neither looked up nor registered.
    pub block_keys: &'a [BlockKey],
    /// Extra keys that the content depends on (adapter, cache salt, media).
    pub extra_keys: Option<&'a Arc<ExtraKeys>>,
}

/// Result of a prefix lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixHit {
    /// Number of leading blocks found.
    pub blocks: u32,
    /// Number of found blocks that no block table references. Adding a reference to such a block reduces the
    /// number of available blocks.
    pub evictable: u32,
}

/// Outcome of `KvCache::publish`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixCacheInsertOutcome {
    /// The block is in the prefix index.
    Stored,
    /// The prefix index already had an equal block, which replaced the block in the block table.
    Deduplicated,
    /// The preceding block of the table is not in the prefix index, or a different block has the same hash.
    /// No further blocks of the table can be registered.
    Rejected,
}

/// Blocks by state; free + cached + in use = pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Number of blocks in the pool.
    pub pool: u32,
    /// Unreferenced blocks that are not in the prefix index.
    pub free: u32,
    /// Unreferenced blocks that are in the prefix index.
    pub cached: u32,
    /// Blocks referenced by tables.
    pub in_use: u32,
}

impl KvCache {
    /// Creates an empty cache.
    ///
    /// Errors: an empty pool, blocks without tokens, a hash size outside 1 to 64 bits, or a number of KV
    /// cache groups outside 1 to 255.
    pub fn new(config: &KvConfig) -> Result<Self, KvConfigError> {
        config.validate()?;
        let (blocks, block_tokens) = (config.blocks, config.spec.block_tokens);
        let lifetime_sample = config.lifetime_sample.filter(|_| config.caching);
        Ok(Self {
            pool: BlockPool::new(blocks),
            index: PrefixIndex::new(blocks, config.guard_key[0]),
            block_metadata: (0..blocks).map(|_| None).collect(),
            cached_tokens: vec![0; blocks as usize * block_tokens as usize],
            block_tokens,
            caching: config.caching,
            record_events: config.events,
            events: Vec::new(),
            published_blocks: 0,
            lifetime_sampler: lifetime_sample
                .map(|rate| Box::new(LifetimeSampler::new(rate, blocks))),
        })
    }

    /// Returns the number of tokens per block.
    #[inline]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the number of blocks for `tokens` positions: `ceil(tokens / block_tokens)`.
    #[inline]
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    /// Returns whether prefix caching is enabled.
    #[inline]
    pub fn is_caching(&self) -> bool {
        self.caching
    }

    /// Returns the number of blocks that can be allocated: free and cached blocks.
    #[inline]
    pub fn available_blocks(&self) -> u32 {
        self.pool.free_count() + self.pool.cached_count()
    }

    /// Returns the number of blocks by state.
    pub fn counts(&self) -> BlockCounts {
        let (pool, free, cached) =
            (self.pool.blocks(), self.pool.free_count(), self.pool.cached_count());
        let in_use =
            pool.checked_sub(free + cached).expect("free and cached blocks are part of the pool");
        BlockCounts { pool, free, cached, in_use }
    }

    /// Iterates over unreferenced blocks of the prefix index, in order of eviction.
    pub fn evictable_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.pool.evictable().map(BlockId)
    }

    /// Returns how many blocks have been registered in the prefix index since the start. The prefix hit of a
    /// waiting request can become longer only if this number increases.
    #[inline]
    pub fn published_blocks(&self) -> u64 {
        self.published_blocks
    }

    /// Returns the reference count of a block.
    #[inline]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block.0)
    }

    /// Returns whether a block is in the prefix index.
    #[inline]
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.is_indexed(block)
    }

    /// Iterates over the block hashes in the prefix index, in no particular order.
    pub fn indexed_hashes(&self) -> impl Iterator<Item = BlockHash> {
        self.index.iter().map(|(hash, _)| hash)
    }

    /// Looks up the longest cached prefix of `content` and appends its blocks to `found`. The last token is
    /// never part of the prefix, so that at least one token is left to forward.
    ///
    /// A block matches only if hash, token ids, extra keys and private guard are equal. No reference to the
    /// found blocks is added: `pin` must be called before any allocation, which could evict them.
    pub fn match_prefix(
        &self,
        content: SequenceContent<'_>,
        found: &mut Vec<BlockId>,
    ) -> PrefixHit {
        let blocks_max = (content.tokens.len() as u32).saturating_sub(1) / self.block_tokens;
        let mut hit = PrefixHit::default();
        if !self.caching {
            return hit;
        }
        for key in content.block_keys.iter().take(blocks_max as usize) {
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

    /// Returns whether `block`, which has the hash of block `index` of `content`, also has its guard, token
    /// ids and extra keys.
    fn matches_block(&self, block: u32, index: u32, content: SequenceContent<'_>) -> bool {
        let metadata =
            self.block_metadata[block as usize].as_ref().expect("an indexed block has metadata");
        metadata.key.guard == content.block_keys[index as usize].guard
            && self.tokens_of_block(block) == self.tokens_of_content(content, index)
            && self.same_extra_keys(metadata, index, content)
    }

    fn same_extra_keys(
        &self,
        metadata: &BlockIdentity,
        index: u32,
        content: SequenceContent<'_>,
    ) -> bool {
        let (block_keys, content_keys) =
            (metadata.extra.as_deref(), content.extra_keys.map(Arc::as_ref));
        ExtraKeys::same_in_block(block_keys, content_keys, index, self.block_tokens)
    }

    fn tokens_of_block(&self, block: u32) -> &[Token] {
        let first = block as usize * self.block_tokens as usize;
        &self.cached_tokens[first..first + self.block_tokens as usize]
    }

    fn tokens_of_content<'a>(&self, content: SequenceContent<'a>, index: u32) -> &'a [Token] {
        let first = index as usize * self.block_tokens as usize;
        &content.tokens[first..first + self.block_tokens as usize]
    }

    /// Appends the blocks of a prefix hit to a table and adds a reference to each block, which prevents its
    /// eviction.
    pub fn pin(&mut self, table: &mut BlockTable, found: &[BlockId]) {
        for &block in found {
            self.pool.pin(block.0);
            table.blocks.push(block);
        }
        if let Some(sampler) = &mut self.lifetime_sampler {
            for block in found {
                sampler.on_used(block.0);
            }
        }
    }

    /// Allocates `count` blocks and appends them to a table. If no block is free, the least recently used
    /// cached block is evicted. The caller has checked `available_blocks() >= count`.
    pub fn allocate(&mut self, table: &mut BlockTable, count: u32) {
        for _ in 0..count {
            let AllocatedBlock { block, evicted } = self.pool.allocate();
            if evicted {
                self.evict(block);
            }
            if let Some(sampler) = &mut self.lifetime_sampler {
                sampler.on_allocated(block);
            }
            table.blocks.push(BlockId(block));
        }
    }

    fn evict(&mut self, block: u32) {
        let metadata =
            self.block_metadata[block as usize].take().expect("a cached block has metadata");
        self.index.remove(metadata.key.hash, block);
        if let Some(sampler) = &mut self.lifetime_sampler {
            sampler.on_evicted(block);
        }
        if !self.record_events {
            return;
        }
        match self.events.last_mut() {
            Some(KvEvent::Removed { hashes, .. }) => hashes.push(metadata.key.hash),
            _ => self.events.push(KvEvent::Removed {
                hashes: vec![metadata.key.hash],
                group: FULL_ATTENTION_GROUP,
            }),
        }
    }

    /// Registers full block `index` of a table in the prefix index; it contains block `index` of `content`.
    /// The KV of the block must be computed. The blocks of a table must be registered in order.
    pub fn publish(
        &mut self,
        table: &mut BlockTable,
        index: u32,
        content: SequenceContent<'_>,
    ) -> PrefixCacheInsertOutcome {
        let key = content.block_keys[index as usize];
        let allocated = table.blocks[index as usize].0;
        let parent = (index > 0).then(|| content.block_keys[index as usize - 1].hash);
        if index > 0 && !self.is_indexed(table.blocks[index as usize - 1]) {
            return PrefixCacheInsertOutcome::Rejected;
        }
        match self.index.get(key.hash) {
            Some(found) if found == allocated => PrefixCacheInsertOutcome::Stored,
            Some(found) if self.matches_block(found, index, content) => {
                self.pool.pin(found);
                self.release(allocated);
                if let Some(sampler) = &mut self.lifetime_sampler {
                    sampler.on_used(found);
                }
                table.blocks[index as usize] = BlockId(found);
                PrefixCacheInsertOutcome::Deduplicated
            }
            Some(_) => PrefixCacheInsertOutcome::Rejected,
            None => {
                self.insert_in_index(
                    allocated,
                    BlockIdentity { key, parent, extra: content.extra_keys.cloned() },
                    index,
                    content,
                );
                PrefixCacheInsertOutcome::Stored
            }
        }
    }

    fn is_indexed(&self, block: BlockId) -> bool {
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
        self.index.insert(metadata.key.hash, block);
        self.block_metadata[block as usize] = Some(metadata);
        self.published_blocks += 1;
    }

    /// Adds a newly registered block to the last KV event if the block directly follows the last block of
    /// that event; otherwise starts a new event.
    fn record_stored_event(&mut self, metadata: &BlockIdentity, index: u32, ids: &[Token]) {
        let extra = metadata.extra.as_ref().map_or_else(Vec::new, |extra| extra.for_block(index));
        if let Some(KvEvent::Stored { hashes, tokens, extra_keys, .. }) = self.events.last_mut()
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
            group: FULL_ATTENTION_GROUP,
        });
    }

    fn release(&mut self, block: u32) {
        let indexed = self.block_metadata[block as usize].is_some();
        self.pool.release(block, indexed);
        if let Some(sampler) = self.lifetime_sampler.as_mut().filter(|_| !indexed)
            && self.pool.ref_count(block) == 0
        {
            sampler.forget(block);
        }
    }

    /// Releases the blocks of a table, last block first. Blocks in the prefix index stay cached.
    pub fn free(&mut self, table: &mut BlockTable) {
        while let Some(block) = table.blocks.pop() {
            self.release(block.0);
        }
    }

    /// Clears the prefix index. Block tables keep their blocks.
    pub fn clear(&mut self) {
        self.index.clear();
        self.block_metadata.iter_mut().for_each(|metadata| *metadata = None);
        if let Some(sampler) = &mut self.lifetime_sampler {
            self.pool.evictable().for_each(|block| sampler.forget(block));
        }
        self.pool.free_all_cached();
        if self.record_events {
            self.events.push(KvEvent::Cleared);
        }
    }

    /// Returns whether `take_events` would return events.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns the changes of the prefix index since the last call, in order.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Sets the current time in milliseconds since an arbitrary origin. The time affects only block
    /// lifetimes.
    #[inline]
    pub fn set_time(&mut self, now_ms: u64) {
        if let Some(sampler) = &mut self.lifetime_sampler {
            sampler.set_time(now_ms);
        }
    }

    /// Returns whether `take_lifetimes` would return lifetimes.
    #[inline]
    pub fn has_lifetimes(&self) -> bool {
        self.lifetime_sampler.as_ref().is_some_and(|sampler| sampler.has_lifetimes())
    }

    /// Returns the lifetimes of sampled blocks evicted since the last call, in order.
    pub fn take_lifetimes(&mut self) -> Vec<BlockLifetime> {
        self.lifetime_sampler.as_mut().map_or_else(Vec::new, |sampler| sampler.take_lifetimes())
    }

    /// Recomputes reference counts, block states and the prefix index from `tables`, which must be all
    /// tables; panics on a difference.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut refs = vec![0; self.pool.blocks() as usize];
        for block in tables.flat_map(BlockTable::blocks) {
            refs[block.0 as usize] += 1;
        }
        self.pool.check(&refs, |block| self.is_indexed(BlockId(block)));
        for (hash, block) in self.index.iter() {
            let metadata = self.block_metadata[block as usize].as_ref();
            let metadata =
                metadata.unwrap_or_else(|| panic!("indexed block {block} has no metadata"));
            assert_eq!(metadata.key.hash, hash, "block {block} is indexed under another hash");
            let parent = metadata.parent;
            assert!(
                parent.is_none_or(|p| self.index.get(p).is_some()),
                "the parent of block {block} is not indexed"
            );
        }
        if let Some(sampler) = &self.lifetime_sampler {
            sampler.check(|block| refs[block as usize] == 0 && !self.is_indexed(BlockId(block)));
        }
        let with_metadata = self.block_metadata.iter().flatten().count();
        assert_eq!(with_metadata, self.index.len(), "metadata and prefix index differ");
    }
}
