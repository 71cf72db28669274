//! KV cache of one replica: a block pool, and for each KV cache group a prefix index of full blocks.
//!
//! All groups allocate from one pool; a request has one block table per group. `publish` registers a full
//! block in the prefix index of its group ("indexed") after its KV is computed. In groups that keep all
//! positions, a block is registered only if its parent (the preceding block of the sequence) is indexed.
//! Therefore the parent of every indexed block of these groups is indexed. Block tables are freed last block
//! first, so blocks without children are evicted first. A hash maps to a single block of a group: if a request
//! computes a block with equal content, the block's entry in the request's block table is replaced by the
//! indexed block (deduplication). In window groups, blocks are released when no later query reads them.

use crate::block_lifetime::LifetimeSampler;
use crate::block_pool::{AllocatedBlock, BlockPool, EvictionOrder};
use crate::cache_group::CacheGroup;
use crate::{
    BlockKey, BlockLifetime, BlockTables, ExtraKeys, KvConfig, KvConfigError, StateCache,
    StateSlots, WindowCheckpoints,
};
use protocol::{BlockHash, BlockId, KvEvent, Token};
use std::sync::Arc;

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

/// Identity of a block in a prefix index, except for its token ids.
#[derive(Debug)]
struct BlockIdentity {
    group: u8,
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

/// Number of entries in the block tables of groups that keep all positions, and in those of window groups. The
/// tables of a request have equal numbers of entries within each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableEntries {
    /// Number for each group that keeps all positions.
    pub kept: u32,
    /// Number for each window group.
    pub windowed: u32,
}

impl TableEntries {
    /// Returns the same number for all groups.
    pub const fn all(entries: u32) -> Self {
        Self { kept: entries, windowed: entries }
    }
}

/// Result of a prefix lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixHit {
    /// Number of leading blocks that all groups have.
    pub blocks: u32,
    /// Number of blocks found in all groups together: window groups need the last blocks of the hit only.
    pub found: u32,
    /// Number of found blocks that no block table references. Adding a reference to such a block reduces the
    /// number of available blocks.
    pub evictable: u32,
    /// Number of leading blocks that the groups which keep all positions have; `blocks` without such groups.
    pub wanted: u32,
    /// The group whose missing window or checkpoint shortened the hit to less than `wanted`, the last of them.
    pub cut_by: Option<u8>,
    /// Number of state slots in each group by which a reference to the checkpoint of the hit reduces the available
    /// slots.
    pub evictable_states: u32,
}

/// Outcome of `KvCache::publish`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixCacheInsertOutcome {
    /// The block is in the prefix index.
    Stored,
    /// The prefix index already had an equal block, which replaced the block in the block table.
    Deduplicated,
    /// The preceding block of the table is not in the prefix index, or a different block has the same hash.
    /// No further blocks of the table can be registered, except in window groups.
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

    /// Looks up the longest prefix of `content` that all groups have cached, and appends its blocks to `found`,
    /// group by group. The last token is never part of the prefix, so that at least one token is left to
    /// forward.
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
        let first_found = found.len();
        let blocks_max = blocks_max.min(content.block_keys.len() as u32);
        if self.groups.len() == 1 && self.group_counts.kept == 1 && self.states.is_empty() {
            found.extend((0..blocks_max).map_while(|i| self.find(0, i, content)).map(BlockId));
            hit.blocks = (found.len() - first_found) as u32;
        } else {
            hit = self.match_groups(content, blocks_max, found);
        }
        let found = &found[first_found..];
        hit.found = found.len() as u32;
        hit.wanted = hit.wanted.max(hit.blocks);
        hit.evictable = found.iter().filter(|block| self.ref_count(**block) == 0).count() as u32;
        hit
    }

    /// Finds the longest prefix of at most `blocks_max` blocks that all groups have, and appends its blocks to
    /// `found`.
    fn match_groups(
        &self,
        content: SequenceContent<'_>,
        blocks_max: u32,
        found: &mut Vec<BlockId>,
    ) -> PrefixHit {
        let mut hit = PrefixHit { wanted: blocks_max, ..PrefixHit::default() };
        self.shorten_to_kept_groups(content, &mut hit);
        while self.shorten_to_windows(content, &mut hit)
            || self.shorten_to_states(content, &mut hit)
        {}
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_hit_block(hit.blocks);
            let block = |index| self.find(group, index, content);
            found.extend((first..hit.blocks).filter_map(block).map(BlockId));
        }
        if hit.blocks > 0 {
            let key = content.block_keys[hit.blocks as usize - 1];
            hit.evictable_states = self.states.evictable(key);
        }
        hit
    }

    /// Shortens a hit to the blocks that the groups which keep all positions have.
    fn shorten_to_kept_groups(&self, content: SequenceContent<'_>, hit: &mut PrefixHit) {
        for (index, group) in self.groups.iter().enumerate().filter(|(_, g)| !g.is_window()) {
            let is_cached = |block| self.find(index, block, content).is_some();
            hit.wanted = group.longest_hit(hit.wanted, is_cached);
        }
        hit.blocks = hit.wanted;
    }

    /// Shortens a hit to a prefix whose windows each window group has. Returns whether it became shorter: the
    /// shorter prefix may lack the windows of other groups.
    fn shorten_to_windows(&self, content: SequenceContent<'_>, hit: &mut PrefixHit) -> bool {
        let before = hit.blocks;
        for (index, group) in self.groups.iter().enumerate().filter(|(_, g)| g.is_window()) {
            let is_cached = |block| self.find(index, block, content).is_some();
            let blocks = group.longest_hit(hit.blocks, is_cached);
            if blocks < hit.blocks {
                hit.blocks = blocks;
                hit.cut_by = Some(index as u8);
            }
        }
        if self.group_counts.kept == 0 {
            // Without a group that keeps all positions, evicted prefixes cannot be distinguished.
            (hit.wanted, hit.cut_by) = (hit.blocks, None);
        }
        hit.blocks < before
    }

    /// Shortens a hit to a prefix at whose end each state group has a checkpoint. Returns whether it became shorter.
    fn shorten_to_states(&self, content: SequenceContent<'_>, hit: &mut PrefixHit) -> bool {
        let before = hit.blocks;
        for group in 0..self.states.groups() {
            let blocks = self.states.longest_hit(group, hit.blocks, content.block_keys);
            if blocks < hit.blocks {
                hit.blocks = blocks;
                hit.cut_by = Some(self.states.group_id(group));
            }
        }
        hit.blocks < before
    }

    /// Returns the indexed block of `group` that has the contents of block `index` of `content`.
    fn find(&self, group: usize, index: u32, content: SequenceContent<'_>) -> Option<u32> {
        let block = self.groups[group].index.get(content.block_keys[index as usize].hash)?;
        self.matches_block(block, index, content).then_some(block)
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
