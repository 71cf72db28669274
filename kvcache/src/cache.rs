//! KV cache of one replica: a block pool, and for each KV cache group a prefix index of full blocks.
//!
//! All groups allocate from one pool; a request has one block table per group. `publish` registers a full
//! block in the prefix index of its group ("indexed") after its KV is computed. In groups that keep all
//! positions, a block is registered only if its parent (the preceding block of the sequence) is indexed.
//! Therefore the parent of every indexed block of these groups is indexed. Block tables are freed last block
//! first, so blocks without children are evicted first. A hash maps to a single block of a group: if a request
//! computes a block with equal content, the block's entry in the request's block table is replaced by the
//! indexed block (deduplication). In window groups, blocks are released when no later query reads them.

mod invariants;
mod prefix_match;
mod publish;
mod query_types;
mod records;

use crate::block_lifetime::LifetimeSampler;
use crate::block_pool::{AllocatedBlock, BlockPool, EvictionOrder};
use crate::cache_group::CacheGroup;
use crate::{BlockTables, KvConfig, KvConfigError, StateCache, WindowCheckpoints};
use protocol::{BlockHash, BlockId, KvEvent, Token};
use publish::BlockIdentity;
pub use query_types::{
    BlockCounts, PrefixCacheInsertOutcome, PrefixHit, SequenceContent, TableEntries,
};

/// Block pool, prefix indexes and events of one replica.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    /// Groups with blocks; state groups follow them in the layout of the model.
    groups: Box<[CacheGroup]>,
    /// Number of groups that keep all positions, and of window groups.
    group_counts: TableEntries,
    /// Slots and checkpoints of the state groups.
    states: StateCache,
    /// For each block of the pool: its metadata if the block is in a prefix index, otherwise `None`.
    block_metadata: Vec<Option<BlockIdentity>>,
    /// Token ids of the blocks in a prefix index, `block_tokens` ids per block of the pool.
    cached_tokens: Vec<Token>,
    block_tokens: u32,
    caching: bool,
    record_events: bool,
    events: Vec<KvEvent>,
    published_blocks: u64,
    lifetime_sampler: Option<Box<LifetimeSampler>>,
}

impl KvCache {
    /// Creates an empty cache.
    ///
    /// Errors: those of `KvConfig::validate`.
    pub fn new(config: &KvConfig) -> Result<Self, KvConfigError> {
        config.validate()?;
        let (blocks, block_tokens) = (config.blocks, config.spec.block_tokens);
        let lifetime_sample = config.lifetime_sample.filter(|_| config.caching);
        let secret = config.guard_key[0];
        let groups = config.spec.groups.iter().filter(|group| !group.kind.is_state());
        let groups: Box<[_]> =
            groups.map(|group| CacheGroup::new(group, block_tokens, blocks, secret)).collect();
        let state_groups = config.spec.groups.len() - groups.len();
        let first_state = groups.len() as u8;
        let windowed = groups.iter().filter(|group| group.is_window()).count() as u32;
        let group_counts = TableEntries { kept: groups.len() as u32 - windowed, windowed };
        let slots = config.state_slots;
        let states = StateCache::new(state_groups, first_state, slots, block_tokens, secret);
        Ok(Self {
            pool: BlockPool::new(blocks),
            groups,
            group_counts,
            states,
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

    /// Returns the number of groups that keep all positions, and of window groups.
    #[inline]
    pub fn group_counts(&self) -> TableEntries {
        self.group_counts
    }

    /// Returns the slots and checkpoints of the state groups.
    #[inline]
    pub fn states(&self) -> &StateCache {
        &self.states
    }

    /// Returns the slots and checkpoints of the state groups.
    #[inline]
    pub fn states_mut(&mut self) -> &mut StateCache {
        &mut self.states
    }

    /// Returns the number of blocks that `grow` would allocate to increase the number of table entries from
    /// `entries` to `target`.
    #[inline]
    pub fn blocks_to_grow(&self, entries: TableEntries, target: TableEntries) -> u32 {
        let TableEntries { kept, windowed } = self.group_counts;
        target.kept.saturating_sub(entries.kept) * kept
            + target.windowed.saturating_sub(entries.windowed) * windowed
    }

    /// Returns the largest number of blocks that a request of `len` tokens holds in the window groups together,
    /// if at most `in_flight` of its tokens are in flight.
    pub fn window_blocks_of_request(&self, len: u32, in_flight: u32) -> u32 {
        let windows = self.groups.iter().filter(|group| group.is_window());
        windows.map(|group| group.blocks_of_request(len, in_flight)).sum()
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

    /// Iterates over the block hashes in the prefix index of a group, in no particular order.
    pub fn indexed_hashes(&self, group: u8) -> impl Iterator<Item = BlockHash> {
        self.groups[usize::from(group)].index.iter().map(|(hash, _)| hash)
    }

    /// Makes the blocks of a prefix hit of `blocks` blocks the entries of empty tables, and adds a reference to
    /// each block, which prevents its eviction. `found` are the blocks that `match_prefix` appended.
    pub fn pin(&mut self, tables: &mut BlockTables, blocks: u32, found: &[BlockId]) {
        tables.ensure_groups(self.groups.len());
        let mut rest = found;
        for (group, table) in self.groups.iter().zip(&mut tables.tables) {
            let first = group.first_hit_block(blocks);
            let (held, others) = rest.split_at((blocks - first) as usize);
            table.blocks.resize(first as usize, BlockId::NULL);
            table.blocks.extend_from_slice(held);
            table.released = first;
            rest = others;
        }
        for &block in found {
            self.pool.pin(block.0);
        }
        if let Some(sampler) = &mut self.lifetime_sampler {
            for block in found {
                sampler.on_used(block.0);
            }
        }
    }

    /// Allocates blocks until each table has at least `entries` entries. If no block is free, the least recently
    /// used cached block is evicted. The caller has checked that `available_blocks` is at least
    /// `blocks_to_grow`.
    pub fn grow(&mut self, tables: &mut BlockTables, entries: TableEntries) {
        tables.ensure_groups(self.groups.len());
        for (group, table) in tables.tables.iter_mut().enumerate() {
            let is_window = self.groups[group].is_window();
            let target = if is_window { entries.windowed } else { entries.kept };
            for _ in table.len()..target {
                let block = self.allocate();
                table.blocks.push(block);
            }
        }
    }

    fn allocate(&mut self) -> BlockId {
        let AllocatedBlock { block, evicted } = self.pool.allocate();
        if evicted {
            self.evict(block);
        }
        if let Some(sampler) = &mut self.lifetime_sampler {
            sampler.on_allocated(block);
        }
        BlockId(block)
    }

    fn evict(&mut self, block: u32) {
        let metadata =
            self.block_metadata[block as usize].take().expect("a cached block has metadata");
        let group = &mut self.groups[usize::from(metadata.group)];
        group.index.remove(metadata.key.hash, block);
        if group.is_read_before_boundary() {
            self.states.forget(metadata.key.hash);
        }
        if let Some(sampler) = &mut self.lifetime_sampler {
            sampler.on_evicted(block);
        }
        if !self.record_events {
            return;
        }
        match self.events.last_mut() {
            Some(KvEvent::Removed { hashes, group }) if *group == metadata.group => {
                hashes.push(metadata.key.hash);
            }
            _ => self
                .events
                .push(KvEvent::Removed { hashes: vec![metadata.key.hash], group: metadata.group }),
        }
    }

    fn release(&mut self, block: u32, order: EvictionOrder) {
        let indexed = self.block_metadata[block as usize].is_some();
        self.pool.release(block, indexed, order);
        if let Some(sampler) = self.lifetime_sampler.as_mut().filter(|_| !indexed)
            && self.pool.ref_count(block) == 0
        {
            sampler.forget(block);
        }
    }

    /// Releases the blocks of window groups that neither a query at `position` or later nor a request that
    /// continues at the last block boundary before `position` reads. Blocks in the prefix index stay cached;
    /// those that no checkpoint needs are evicted first.
    ///
    /// Returns the number of blocks that became available.
    pub fn release_before_window(
        &mut self,
        tables: &mut BlockTables,
        position: u32,
        checkpoints: WindowCheckpoints,
    ) -> u32 {
        let available = self.available_blocks();
        let boundary = position / self.block_tokens * self.block_tokens;
        for (group, table) in tables.tables.iter_mut().enumerate() {
            let end = self.groups[group].first_read_block(boundary).min(table.len());
            for index in table.released..end {
                let block = std::mem::replace(&mut table.blocks[index as usize], BlockId::NULL);
                let is_needed = checkpoints.need(&self.groups[group], index);
                let order = if is_needed { EvictionOrder::Last } else { EvictionOrder::First };
                self.release(block.0, order);
            }
            table.released = table.released.max(end);
        }
        self.available_blocks() - available
    }

    /// Releases the blocks of all tables, last block first. Blocks in the prefix index stay cached.
    pub fn free(&mut self, tables: &mut BlockTables) {
        for table in &mut tables.tables {
            while table.len() > table.released
                && let Some(block) = table.blocks.pop()
            {
                self.release(block.0, EvictionOrder::Last);
            }
            table.blocks.clear();
            table.released = 0;
        }
    }

    /// Clears the prefix indexes. Block tables keep their blocks.
    pub fn clear(&mut self) {
        self.groups.iter_mut().for_each(|group| group.index.clear());
        self.states.clear();
        self.block_metadata.iter_mut().for_each(|metadata| *metadata = None);
        if let Some(sampler) = &mut self.lifetime_sampler {
            self.pool.evictable().for_each(|block| sampler.forget(block));
        }
        self.pool.free_all_cached();
        if self.record_events {
            self.events.push(KvEvent::Cleared);
        }
    }
}
