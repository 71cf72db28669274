//! Property tests of the cache: it must behave like a reference implementation that stores whole prefixes and
//! lists.

mod cache_scenarios;
mod reference_cache;

use crate::{
    BlockKey, BlockLifetime, BlockTable, BlockTables, ExtraKeys, KvCache, KvConfig,
    LifetimeSampleRate, PrefixCacheInsertOutcome, SequenceContent, TableEntries,
};
use expect_test::{Expect, expect};
use proptest::prelude::*;
use protocol::{BlockHash, BlockId, KvEvent, KvGroup, KvKind, KvSpec, Token};
use reference_cache::{ReferenceCache, ReferenceRequest};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const BLOCK_TOKENS: u32 = 2;
const BLOCKS: u32 = 12;

fn config(hash_bits: u8) -> KvConfig {
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
    let lifetime_sample = LifetimeSampleRate::new(1.0);
    KvConfig { hash_bits, lifetime_sample, ..KvConfig::new(spec, BLOCKS, [7, 8]) }
}

/// Operation on the tested cache and on the reference cache.
#[derive(Debug, Clone)]
enum CacheOp {
    /// Starts a request with these token ids, if its blocks fit. The bool is whether the request has a cache
    /// salt.
    Start(Vec<Token>, bool),
    /// Registers up to `.1` further blocks of request `.0` in the prefix index.
    Publish(usize, u32),
    /// Frees the blocks of a request.
    Free(usize),
    /// Clears the prefix index.
    Clear,
}

fn cache_op() -> impl Strategy<Value = CacheOp> {
    // Prompts are short and use only two token ids, so that prompts often share a prefix.
    let tokens = prop::collection::vec(0..2_u32, 1..9);
    prop_oneof![
        4 => (tokens, any::<bool>()).prop_map(|(tokens, salted)| CacheOp::Start(tokens, salted)),
        4 => (any::<usize>(), 1..4_u32).prop_map(|(holder, blocks)| CacheOp::Publish(holder, blocks)),
        3 => any::<usize>().prop_map(CacheOp::Free),
        1 => Just(CacheOp::Clear),
    ]
}

/// The tested cache, the reference cache, and the requests that hold blocks in both caches.
struct CacheComparison {
    kv: KvCache,
    reference: ReferenceCache,
    holders: Vec<ReferenceRequest>,
    /// The prefix index as a subscriber of KV events rebuilds it.
    event_index: BTreeSet<BlockHash>,
    config: KvConfig,
    /// Whether block hashes have all 64 bits. Hash collisions then do not occur, and the reference predicts
    /// every outcome.
    exact: bool,
}

impl CacheComparison {
    fn new(hash_bits: u8) -> Self {
        let config = config(hash_bits);
        let kv = KvCache::new(&config).expect("a valid configuration");
        let model = ReferenceCache { free: (0..BLOCKS).collect(), ..ReferenceCache::default() };
        let exact = hash_bits == 64;
        Self {
            kv,
            reference: model,
            holders: Vec::new(),
            event_index: BTreeSet::new(),
            config,
            exact,
        }
    }

    fn apply(&mut self, op: CacheOp) {
        self.reference.now_ms += 1 << (self.reference.block_uses.len() % 7);
        self.kv.set_time(self.reference.now_ms);
        match op {
            CacheOp::Start(tokens, salted) => self.start(tokens, salted),
            CacheOp::Publish(holder, blocks) if !self.holders.is_empty() => {
                let holder = holder % self.holders.len();
                (0..blocks).for_each(|_| self.publish(holder));
            }
            CacheOp::Free(holder) if !self.holders.is_empty() => {
                let mut holder = self.holders.swap_remove(holder % self.holders.len());
                for block in holder.tables.group(0).blocks().iter().rev() {
                    self.reference.release(block.0);
                }
                self.kv.free(&mut holder.tables);
            }
            CacheOp::Clear => {
                self.kv.clear();
                self.reference.indexed.clear();
                let cached = std::mem::take(&mut self.reference.cached);
                self.reference.block_uses.retain(|block, _| !cached.contains(block));
                self.reference.free.extend(cached);
            }
            CacheOp::Publish(..) | CacheOp::Free(_) => {}
        }
        self.check_events();
        assert_eq!(self.kv.has_lifetimes(), !self.reference.lifetimes.is_empty());
        assert_eq!(self.kv.take_lifetimes(), std::mem::take(&mut self.reference.lifetimes));
        self.compare();
    }

    /// Compares a prefix hit of `holder` with the reference: the blocks `found`, the number of hit blocks and
    /// the number of evictable blocks among them.
    fn check_hit(&self, holder: &ReferenceRequest, found: &[BlockId], blocks: u32, evictable: u32) {
        for (i, &BlockId(block)) in found.iter().enumerate() {
            let expected = self.reference.indexed.get(&holder.prefix(i as u32 + 1));
            assert_eq!(expected, Some(&block), "a hit block has another prefix");
        }
        let blocks_max = (holder.tokens.len() as u32 - 1) / BLOCK_TOKENS;
        let is_indexed =
            |&blocks: &u32| self.reference.indexed.contains_key(&holder.prefix(blocks));
        if self.exact {
            assert_eq!(blocks, (1..=blocks_max).take_while(is_indexed).count() as u32);
        }
        let idle = found.iter().filter(|block| self.reference.cached.contains(&block.0)).count();
        assert_eq!(evictable, idle as u32);
    }

    fn start(&mut self, tokens: Vec<Token>, salted: bool) {
        let extra = ExtraKeys::salted(salted.then(|| "tenant".to_owned()));
        let mut keys = Vec::new();
        self.config.block_hasher().extend_keys(&mut keys, &tokens, extra.as_deref());
        let (tables, publishing) = (BlockTables::default(), true);
        let mut holder = ReferenceRequest { tokens, keys, extra, tables, published: 0, publishing };
        let mut found = Vec::new();
        let hit = self.kv.match_prefix(holder.content(), &mut found);
        self.check_hit(&holder, &found, hit.blocks, hit.evictable);
        let blocks = self.kv.blocks_for(holder.tokens.len() as u32);
        if blocks - hit.blocks + hit.evictable > self.kv.available_blocks() {
            return;
        }
        for block in &found {
            self.reference.pin(block.0);
        }
        self.kv.pin(&mut holder.tables, hit.blocks, &found);
        let fresh: Vec<u32> = (hit.blocks..blocks).map(|_| self.reference.allocate()).collect();
        self.kv.grow(&mut holder.tables, TableEntries::all(blocks));
        let allocated =
            holder.tables.group(0).blocks()[hit.blocks as usize..].iter().map(|block| block.0);
        assert!(allocated.eq(fresh), "allocated blocks are not the lowest free and the LRU blocks");
        holder.published = hit.blocks;
        self.holders.push(holder);
    }

    fn publish(&mut self, holder: usize) {
        let holder = &mut self.holders[holder];
        let full = holder.tokens.len() as u32 / BLOCK_TOKENS;
        if holder.published == full || !holder.publishing {
            return;
        }
        let index = holder.published;
        let block = holder.tables.group(0).blocks()[index as usize].0;
        let prefix = holder.prefix(index + 1);
        let parent_is_indexed = index == 0 || {
            let parent = holder.tables.group(0).blocks()[index as usize - 1].0;
            self.reference.indexed.values().any(|&block| block == parent)
        };
        let (tokens, block_keys) = (&holder.tokens, &holder.keys);
        let content = SequenceContent { tokens, block_keys, extra_keys: holder.extra.as_ref() };
        let outcome = self.kv.publish(&mut holder.tables, 0, index, content);
        let indexed = self.reference.indexed.get(&prefix).copied();
        match outcome {
            PrefixCacheInsertOutcome::Stored => {
                assert!(parent_is_indexed && indexed.is_none());
                self.reference.indexed.insert(prefix, block);
            }
            PrefixCacheInsertOutcome::Deduplicated => {
                let indexed = indexed.expect("only an equal block is deduplicated");
                assert_eq!(holder.tables.group(0).blocks()[index as usize].0, indexed);
                self.reference.replace(block, indexed);
            }
            PrefixCacheInsertOutcome::Rejected => {
                assert!(!parent_is_indexed || !self.exact, "rejected without a reason");
                holder.publishing = false;
                return;
            }
        }
        holder.published += 1;
    }

    fn check_events(&mut self) {
        let has_events = self.kv.has_events();
        let events = self.kv.take_events();
        assert_eq!((has_events, self.kv.has_events()), (!events.is_empty(), false));
        for event in events {
            match event {
                KvEvent::Stored { hashes, parent, tokens, extra_keys, .. } => {
                    assert!(parent.is_none_or(|parent| self.event_index.contains(&parent)));
                    assert_eq!(tokens.len(), hashes.len() * BLOCK_TOKENS as usize);
                    assert_eq!(extra_keys.len(), hashes.len());
                    for hash in hashes {
                        assert!(self.event_index.insert(hash), "stored twice");
                    }
                }
                KvEvent::Removed { hashes, .. } => {
                    let all_stored = hashes.iter().all(|hash| self.event_index.remove(hash));
                    assert!(all_stored, "removed without being stored");
                }
                KvEvent::Cleared => self.event_index.clear(),
            }
        }
    }

    fn compare(&self) {
        self.kv.check(self.holders.iter().map(|holder| &holder.tables));
        let counts = self.kv.counts();
        let (free, cached) = (self.reference.free.len(), self.reference.cached.len());
        assert_eq!((counts.free as usize, counts.cached as usize), (free, cached));
        let indexed: BTreeSet<u32> = self.reference.indexed.values().copied().collect();
        let found = (0..BLOCKS).filter(|&block| self.kv.is_cached(BlockId(block)));
        assert!(found.eq(indexed), "indexed blocks differ");
        assert_eq!(self.event_index.len(), self.reference.indexed.len(), "events and index differ");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn cache_agrees_with_the_reference(ops in prop::collection::vec(cache_op(), 1..60)) {
        let mut run = CacheComparison::new(64);
        for op in ops {
            run.apply(op);
        }
    }

    #[test]
    fn colliding_hashes_cost_hits_but_never_correctness(
        ops in prop::collection::vec(cache_op(), 1..60),
        bits in 1..6_u8,
    ) {
        let mut run = CacheComparison::new(bits);
        for op in ops {
            run.apply(op);
        }
    }
}
