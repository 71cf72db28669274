//! The KV cache of one replica: block tables over a pool, and the index of full blocks.
//!
//! A block is published once its KV is computed, never before, and only if its parent is; so every
//! indexed block's parent is indexed, and tables freed tail first are evicted leaf first. A hash
//! leads to one block: a table that computed the same content adopts the indexed one.

use crate::index::Index;
use crate::pool::{Pool, Taken};
use crate::residency::Residency;
use crate::{BlockKey, Bug, ExtraKeys, KvConfig, KvError, Planted, Stay, Table};
use protocol::{BlockHash, BlockId, KvEvent, Token};
use std::sync::Arc;

/// The KV group whose table all groups of kind `Full` share.
const SHARED_GROUP: u8 = 0;

/// Blocks, tables and prefixes of one replica.
#[derive(Debug)]
pub struct KvCache {
    pool: Pool,
    index: Index,
    /// What each indexed block holds; `None` = not findable.
    labels: Vec<Option<Label>>,
    /// Ids in each indexed block, `block_tokens` per block.
    tokens: Vec<Token>,
    block_tokens: u32,
    caching: bool,
    record_events: bool,
    events: Vec<KvEvent>,
    published: u64,
    residency: Option<Box<Residency>>,
    planted: Planted,
}

/// Identity of an indexed block, apart from its ids.
#[derive(Debug)]
struct Label {
    key: BlockKey,
    parent: Option<BlockHash>,
    extra: Option<Arc<ExtraKeys>>,
}

/// What a request's blocks hold.
#[derive(Debug, Clone, Copy)]
pub struct Content<'a> {
    /// Ids from position 0.
    pub tokens: &'a [Token],
    /// Keys of its full blocks; missing ones at the end count as not full.
    pub keys: &'a [BlockKey],
    /// What else it depends on.
    pub extra: Option<&'a Arc<ExtraKeys>>,
}

/// Result of a prefix lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hit {
    /// Leading blocks found.
    pub blocks: u32,
    /// Of these, blocks that nobody holds: claiming them uses up free blocks.
    pub idle: u32,
}

/// Result of publishing one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The block is findable now.
    Stored,
    /// An equal block was findable already and has taken its place in the table.
    Adopted,
    /// Its parent is not findable, or another block has its hash: publish no more of this table.
    Refused,
}

/// Blocks by state; vacant + cached + in use = pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Blocks in all.
    pub pool: u32,
    /// Held by nobody and not findable.
    pub vacant: u32,
    /// Held by nobody and findable.
    pub cached: u32,
    /// Held by tables.
    pub in_use: u32,
}

impl KvCache {
    /// An empty cache.
    ///
    /// Errors: a pool, block or hash of size zero, or a layout without groups.
    pub fn new(config: &KvConfig) -> Result<Self, KvError> {
        config.validate()?;
        let (blocks, block_tokens) = (config.blocks, config.spec.block_tokens);
        let sampled = config.residency.filter(|_| config.caching);
        Ok(Self {
            pool: Pool::new(blocks, config.planted),
            index: Index::new(blocks, config.guard_key[0]),
            labels: (0..blocks).map(|_| None).collect(),
            tokens: vec![0; blocks as usize * block_tokens as usize],
            block_tokens,
            caching: config.caching,
            record_events: config.events,
            events: Vec::new(),
            published: 0,
            residency: sampled.map(|share| Box::new(Residency::new(share, blocks))),
            planted: config.planted,
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
    pub fn planted(&self) -> Planted {
        self.planted
    }

    /// Blocks that can be taken: vacant ones and cached idle ones.
    #[inline]
    pub fn available(&self) -> u32 {
        self.pool.vacant() + self.pool.cached()
    }

    /// Blocks by state.
    pub fn counts(&self) -> BlockCounts {
        let (pool, vacant, cached) = (self.pool.blocks(), self.pool.vacant(), self.pool.cached());
        let in_use = pool.checked_sub(vacant + cached).expect("free blocks are part of the pool");
        BlockCounts { pool, vacant, cached, in_use }
    }

    /// Findable blocks that nobody holds, in the order in which they would be evicted.
    pub fn idle_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.pool.idle().map(BlockId)
    }

    /// Blocks that became findable since the start; a waiting request's hit can only have grown by these.
    #[inline]
    pub fn published(&self) -> u64 {
        self.published
    }

    /// Tables that hold a block.
    #[inline]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.pool.refs(block.0)
    }

    /// Whether a prefix hit may find a block.
    #[inline]
    pub fn is_findable(&self, block: BlockId) -> bool {
        self.is_indexed(block)
    }

    /// The hashes under which blocks can be found, in no particular order.
    pub fn hashes(&self) -> impl Iterator<Item = BlockHash> {
        self.index.iter().map(|(hash, _)| hash)
    }

    /// Appends the longest findable prefix of `content` to `found`. The last token is never part of
    /// it: at least one is left to forward.
    ///
    /// A block matches only if hash, ids, extra keys and guard are equal. Nothing is pinned:
    /// `claim` must come before anything else is taken.
    pub fn match_prefix(&self, content: Content<'_>, found: &mut Vec<BlockId>) -> Hit {
        let keep = u32::from(!self.planted.has(Bug::LastTokenFromCache));
        let longest = (content.tokens.len() as u32).saturating_sub(keep) / self.block_tokens;
        let mut hit = Hit::default();
        if !self.caching {
            return hit;
        }
        for key in content.keys.iter().take(longest as usize) {
            let Some(block) = self.index.get(key.hash) else { break };
            if !self.holds(block, hit.blocks, content) {
                break;
            }
            hit.blocks += 1;
            hit.idle += u32::from(self.pool.refs(block) == 0);
            found.push(BlockId(block));
        }
        hit
    }

    /// Whether indexed `block` is block `index` of `content`, beyond the equality of hashes.
    fn holds(&self, block: u32, index: u32, content: Content<'_>) -> bool {
        if self.planted.has(Bug::GuardIgnored) {
            return true;
        }
        let label = self.labels[block as usize].as_ref().expect("an indexed block has a label");
        label.key.guard == content.keys[index as usize].guard
            && self.ids(block) == self.ids_of(content, index)
            && (self.planted.has(Bug::SaltIgnored) || self.same_extra(label, index, content))
    }

    fn same_extra(&self, label: &Label, index: u32, content: Content<'_>) -> bool {
        let (own, other) = (label.extra.as_deref(), content.extra.map(Arc::as_ref));
        ExtraKeys::same_in_block(own, other, index, self.block_tokens)
    }

    fn ids(&self, block: u32) -> &[Token] {
        let first = block as usize * self.block_tokens as usize;
        &self.tokens[first..first + self.block_tokens as usize]
    }

    fn ids_of<'a>(&self, content: Content<'a>, index: u32) -> &'a [Token] {
        let first = index as usize * self.block_tokens as usize;
        &content.tokens[first..first + self.block_tokens as usize]
    }

    /// Appends found blocks to a table and keeps them from eviction.
    pub fn claim(&mut self, table: &mut Table, found: &[BlockId]) {
        for &block in found {
            self.pool.claim(block.0);
            table.blocks.push(block);
        }
        if let Some(residency) = &mut self.residency {
            for block in found {
                residency.used(block.0);
            }
        }
    }

    /// Appends `count` blocks to a table, evicting the longest idle ones if none is vacant. The caller
    /// has seen `available() >= count`.
    pub fn grow(&mut self, table: &mut Table, count: u32) {
        for _ in 0..count {
            let Taken { block, evicted } = self.pool.take();
            if evicted {
                self.evict(block);
            }
            if let Some(residency) = &mut self.residency {
                residency.taken(block);
            }
            table.blocks.push(BlockId(block));
        }
    }

    fn evict(&mut self, block: u32) {
        let label = self.labels[block as usize].take().expect("a cached block has a label");
        self.index.remove(label.key.hash, block);
        if let Some(residency) = &mut self.residency {
            residency.evicted(block);
        }
        if !self.record_events || self.planted.has(Bug::EvictionWithoutEvent) {
            return;
        }
        match self.events.last_mut() {
            Some(KvEvent::Removed { hashes, .. }) => hashes.push(label.key.hash),
            _ => self
                .events
                .push(KvEvent::Removed { hashes: vec![label.key.hash], group: SHARED_GROUP }),
        }
    }

    /// Makes full block `index` of a table findable as block `index` of `content`, whose KV must be
    /// computed. Blocks are published in order.
    pub fn publish(&mut self, table: &mut Table, index: u32, content: Content<'_>) -> Published {
        let key = content.keys[index as usize];
        let own = table.blocks[index as usize].0;
        let parent = (index > 0).then(|| content.keys[index as usize - 1].hash);
        if index > 0 && !self.is_indexed(table.blocks[index as usize - 1]) {
            return Published::Refused;
        }
        match self.index.get(key.hash) {
            Some(found) if found == own => Published::Stored,
            Some(found) if self.holds(found, index, content) => {
                self.pool.claim(found);
                self.release(own);
                if let Some(residency) = &mut self.residency {
                    residency.used(found);
                }
                table.blocks[index as usize] = BlockId(found);
                Published::Adopted
            }
            Some(_) => Published::Refused,
            None => {
                self.store(
                    own,
                    Label { key, parent, extra: content.extra.cloned() },
                    index,
                    content,
                );
                Published::Stored
            }
        }
    }

    fn is_indexed(&self, block: BlockId) -> bool {
        self.labels[block.0 as usize].is_some()
    }

    fn store(&mut self, block: u32, label: Label, index: u32, content: Content<'_>) {
        assert!(!self.is_indexed(BlockId(block)), "block {block} is published twice");
        assert_eq!(self.pool.refs(block), 1, "block {block} was written by one of several holders");
        let ids = self.ids_of(content, index);
        if self.record_events {
            self.record_stored(&label, index, ids);
        }
        let first = block as usize * self.block_tokens as usize;
        self.tokens[first..first + ids.len()].copy_from_slice(ids);
        self.index.insert(label.key.hash, block);
        self.labels[block as usize] = Some(label);
        self.published += 1;
    }

    /// Adds a block to the run it continues, or starts a run.
    fn record_stored(&mut self, label: &Label, index: u32, ids: &[Token]) {
        let extra = label.extra.as_ref().map_or_else(Vec::new, |extra| extra.of_block(index));
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
            group: SHARED_GROUP,
        });
    }

    fn release(&mut self, block: u32) {
        let findable = self.labels[block as usize].is_some();
        self.pool.release(block, findable);
        if let Some(residency) = self.residency.as_mut().filter(|_| !findable)
            && self.pool.refs(block) == 0
        {
            residency.forget(block);
        }
    }

    /// Gives a table's blocks back, tail first; published ones stay findable.
    pub fn free(&mut self, table: &mut Table) {
        while let Some(block) = table.blocks.pop() {
            self.release(block.0);
        }
    }

    /// Loses one block of a table for ever, as a forgotten release would.
    #[cfg(feature = "planted")]
    pub fn leak(&mut self, table: &mut Table) {
        table.blocks.pop();
    }

    /// Forgets every prefix. Tables keep their blocks.
    pub fn clear(&mut self) {
        self.index.clear();
        self.labels.iter_mut().for_each(|label| *label = None);
        if let Some(residency) = &mut self.residency {
            self.pool.idle().for_each(|block| residency.forget(block));
        }
        self.pool.forget_cached();
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
        if let Some(residency) = &mut self.residency {
            residency.set_time(now_ms);
        }
    }

    /// Whether `take_stays` would return something.
    #[inline]
    pub fn has_stays(&self) -> bool {
        self.residency.as_ref().is_some_and(|residency| residency.has_stays())
    }

    /// Stays of sampled blocks that were evicted since the last call, in order.
    pub fn take_stays(&mut self) -> Vec<Stay> {
        self.residency.as_mut().map_or_else(Vec::new, |residency| residency.take_stays())
    }

    /// Recomputes everything from `tables`, which must be all there are; panics on a difference.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a Table>) {
        let mut refs = vec![0; self.pool.blocks() as usize];
        for block in tables.flat_map(Table::blocks) {
            refs[block.0 as usize] += 1;
        }
        self.pool.check(&refs, |block| self.is_indexed(BlockId(block)));
        for (hash, block) in self.index.iter() {
            let label = self.labels[block as usize].as_ref();
            let label = label.unwrap_or_else(|| panic!("indexed block {block} has no label"));
            assert_eq!(label.key.hash, hash, "block {block} is indexed under another hash");
            let parent = label.parent;
            assert!(parent.is_none_or(|p| self.index.get(p).is_some()), "{block} has no parent");
        }
        if let Some(residency) = &self.residency {
            residency.check(|block| refs[block as usize] == 0 && !self.is_indexed(BlockId(block)));
        }
        let labelled = self.labels.iter().flatten().count();
        assert_eq!(labelled, self.index.len(), "labels and index differ");
    }
}
