//! Property tests of the cache: it must behave like a reference implementation that stores whole prefixes and
//! lists.

use crate::{
    BlockKey, BlockLifetime, BlockTable, BlockTables, ExtraKeys, KvCache, KvConfig,
    LifetimeSampleRate, PrefixCacheInsertOutcome, SequenceContent, TableEntries,
};
use expect_test::{Expect, expect};
use proptest::prelude::*;
use protocol::{BlockHash, BlockId, KvEvent, KvGroup, KvKind, KvSpec, Token};
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

/// All inputs that the KV of a block depends on: the salt, and the token ids up to the end of the block.
type PrefixKey = (Option<String>, Vec<Token>);

/// A request: its content, its block table, and the number of its blocks in the prefix index.
struct ReferenceRequest {
    tokens: Vec<Token>,
    keys: Vec<BlockKey>,
    extra: Option<Arc<ExtraKeys>>,
    tables: BlockTables,
    published: u32,
    publishing: bool,
}

impl ReferenceRequest {
    fn prefix(&self, blocks: u32) -> PrefixKey {
        let salt = self.extra.as_ref().and_then(|extra| extra.salt.clone());
        (salt, self.tokens[..(blocks * BLOCK_TOKENS) as usize].to_vec())
    }

    fn content(&self) -> SequenceContent<'_> {
        SequenceContent {
            tokens: &self.tokens,
            block_keys: &self.keys,
            extra_keys: self.extra.as_ref(),
        }
    }
}

/// Expected state of the cache: available blocks in the order in which they will be allocated, and the prefix
/// of each indexed block.
#[derive(Default)]
struct ReferenceCache {
    free: BTreeSet<u32>,
    cached: Vec<u32>,
    refs: BTreeMap<u32, u32>,
    indexed: BTreeMap<PrefixKey, u32>,
    now_ms: u64,
    /// Allocation time and use times of each block that is not free.
    block_uses: BTreeMap<u32, Vec<u64>>,
    /// Lifetimes of evicted blocks.
    lifetimes: Vec<BlockLifetime>,
}

impl ReferenceCache {
    fn allocate(&mut self) -> u32 {
        let block = self.free.pop_first().unwrap_or_else(|| {
            let oldest = self.cached.remove(0);
            self.indexed.retain(|_, &mut block| block != oldest);
            let times = self.block_uses.remove(&oldest).expect("a cached block was allocated");
            self.lifetimes.push(expected_lifetime(&times, self.now_ms));
            oldest
        });
        self.block_uses.insert(block, vec![self.now_ms]);
        self.refs.insert(block, 1);
        block
    }

    fn pin(&mut self, block: u32) {
        self.cached.retain(|&other| other != block);
        self.block_uses
            .get_mut(&block)
            .expect("a pinned block is in use or cached")
            .push(self.now_ms);
        *self.refs.entry(block).or_default() += 1;
    }

    fn release(&mut self, block: u32) {
        let refs = self.refs.get_mut(&block).expect("a released block is referenced");
        *refs -= 1;
        if *refs > 0 {
            return;
        }
        if self.indexed.values().any(|&other| other == block) {
            self.cached.push(block);
        } else {
            self.block_uses.remove(&block);
            self.free.insert(block);
        }
    }
}

impl ReferenceCache {
    /// Replaces a reference to `block` by one to `indexed`.
    fn replace(&mut self, block: u32, indexed: u32) {
        self.pin(indexed);
        self.release(block);
    }
}

/// Computes the expected lifetime of a block from its allocation time (first entry) and its use times.
fn expected_lifetime(times: &[u64], now_ms: u64) -> BlockLifetime {
    let uses = &times[1..];
    let gaps: Vec<u64> = uses.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let first = gaps.len().saturating_sub(3);
    BlockLifetime {
        lifetime_ms: now_ms - times[0],
        idle_ms: now_ms - times[times.len() - 1],
        reuse_gaps_ms: gaps[first..].to_vec(),
    }
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

/// Runs `ops` on a cache of four blocks, and compares block tables, free count and cached blocks (least
/// recently used first) with `expected`.
fn check(ops: &[&str], expected: &Expect) {
    let mut config = config(64);
    config.blocks = 4;
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let mut tables: BTreeMap<char, BlockTables> = BTreeMap::new();
    for op in ops {
        let (verb, block_name) = op.split_once(' ').expect("`verb name`");
        let name = block_name.chars().next().expect("a name");
        let tokens = vec![u32::from(name); BLOCK_TOKENS as usize + 1];
        let mut keys = Vec::new();
        config.block_hasher().extend_keys(&mut keys, &tokens, None);
        let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
        let table = tables.entry(name).or_default();
        match verb {
            "allocate" => {
                let entries = table.iter().map(BlockTable::len).sum::<u32>() + 1;
                kv.grow(table, TableEntries::all(entries));
            }
            "publish" => {
                assert_eq!(kv.publish(table, 0, 0, content), PrefixCacheInsertOutcome::Stored);
            }
            "free" => kv.free(table),
            "hit" => {
                let mut found = Vec::new();
                let hit = kv.match_prefix(content, &mut found);
                kv.pin(table, hit.blocks, &found);
            }
            verb => panic!("unknown verb {verb}"),
        }
    }
    expected.assert_eq(show(&kv, &tables).trim());
}

/// Returns the blocks of each table in `tables`, the free count and the cached blocks as text.
fn show(kv: &KvCache, tables: &BTreeMap<char, BlockTables>) -> String {
    let references = tables.iter().flat_map(|(name, table)| {
        let blocks = table.iter().flat_map(BlockTable::held);
        blocks.map(move |block| format!("{name}={}", block.0))
    });
    let references: Vec<String> = references.collect();
    let cached: Vec<String> = kv.evictable_blocks().map(|block| block.0.to_string()).collect();
    let free = kv.counts().free;
    format!("{} | free {free} | cached {}", references.join(" "), cached.join(" "))
}

#[test]
fn lru_eviction_order() {
    // Free blocks are allocated before cached blocks, lowest id first. A block that is freed without being
    // registered in the prefix index becomes free again.
    check(
        &["allocate a", "allocate b", "free a", "allocate c"],
        &expect!["b=1 c=0 | free 2 | cached"],
    );
    // An indexed block becomes cached when it is freed, and is not evicted while a free block is available.
    let ab = ["allocate a", "publish a", "allocate b", "publish b", "free a", "free b"];
    check(&ab, &expect!["| free 2 | cached 0 1"]);
    check(&[&ab[..], &["allocate c"]].concat(), &expect!["c=2 | free 1 | cached 0 1"]);
    // A cached block that is hit leaves the LRU list. When it is freed again, it is the most recently used
    // block.
    check(&[&ab[..], &["hit a"]].concat(), &expect!["a=0 | free 2 | cached 1"]);
    check(&[&ab[..], &["hit a", "free a"]].concat(), &expect!["| free 2 | cached 1 0"]);
    // If no block is free, the least recently used cached block is evicted.
    let full = [&ab[..], &["hit a", "free a", "allocate c", "allocate c", "allocate d"]].concat();
    check(&full, &expect!["c=2 c=3 d=1 | free 0 | cached 0"]);
}

#[test]
fn tables_are_evicted_leaf_first() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens: Vec<Token> = (0..6).collect();
    let mut keys = Vec::new();
    config.block_hasher().extend_keys(&mut keys, &tokens, None);
    let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
    let mut tables = BlockTables::default();
    kv.grow(&mut tables, TableEntries::all(3));
    for index in [0, 1, 0, 2] {
        assert_eq!(
            kv.publish(&mut tables, 0, index, content),
            PrefixCacheInsertOutcome::Stored,
            "also when repeated"
        );
    }
    assert_eq!((kv.published_blocks(), tables.is_empty()), (3, false));
    kv.free(&mut tables);
    assert!(tables.is_empty());
    kv.take_events();
    kv.grow(&mut tables, TableEntries::all(BLOCKS));
    let removed: Vec<BlockHash> = keys.iter().rev().map(|key| key.hash).collect();
    assert_eq!(kv.take_events(), [KvEvent::Removed { hashes: removed, group: 0 }]);
}

#[test]
fn publishing_stops_at_an_unindexed_parent() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens: Vec<Token> = (0..4).collect();
    let mut keys = Vec::new();
    config.block_hasher().extend_keys(&mut keys, &tokens, None);
    let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
    let mut tables = BlockTables::default();
    kv.grow(&mut tables, TableEntries::all(2));
    assert_eq!(kv.publish(&mut tables, 0, 0, content), PrefixCacheInsertOutcome::Stored);
    kv.clear();
    assert_eq!(
        kv.publish(&mut tables, 0, 1, content),
        PrefixCacheInsertOutcome::Rejected,
        "the parent is not indexed"
    );
    kv.check([&tables].into_iter());
}

#[test]
fn lifetimes_are_sampled_only_for_cached_blocks() {
    let run = |lifetime_sample, caching| {
        let config = KvConfig { caching, lifetime_sample, ..config(64) };
        let mut kv = KvCache::new(&config).expect("a valid configuration");
        let mut lifetimes = 0;
        for n in 0..1_000 {
            let tokens = vec![n; BLOCK_TOKENS as usize];
            let mut keys = Vec::new();
            config.block_hasher().extend_keys(&mut keys, &tokens, None);
            let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
            let mut tables = BlockTables::default();
            kv.grow(&mut tables, TableEntries::all(1));
            if caching {
                assert_eq!(
                    kv.publish(&mut tables, 0, 0, content),
                    PrefixCacheInsertOutcome::Stored
                );
            }
            kv.free(&mut tables);
            lifetimes += kv.take_lifetimes().len();
        }
        lifetimes
    };
    assert_eq!((run(None, true), run(LifetimeSampleRate::new(1.0), false)), (0, 0));
    let evicted = 1_000 - BLOCKS as usize;
    assert_eq!(run(LifetimeSampleRate::new(1.0), true), evicted);
    let half = run(LifetimeSampleRate::new(0.5), true);
    assert!((evicted * 4 / 10..evicted * 6 / 10).contains(&half), "{half} of {evicted}");
}

/// Checks that cached blocks of a request with another cache salt do not match, even if a submitter computed
/// the block keys with the wrong salt.
#[test]
fn prefix_hit_requires_equal_extra_keys() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens = [1; BLOCK_TOKENS as usize + 1];
    let [salt, other_salt] = ["own", "other"].map(|salt| ExtraKeys::salted(Some(salt.to_owned())));
    let mut keys = Vec::new();
    config.block_hasher().extend_keys(&mut keys, &tokens, salt.as_deref());
    let content = |extra| SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: extra };
    let mut tables = BlockTables::default();
    kv.grow(&mut tables, TableEntries::all(1));
    assert_eq!(
        kv.publish(&mut tables, 0, 0, content(salt.as_ref())),
        PrefixCacheInsertOutcome::Stored
    );
    let hits = [salt.as_ref(), other_salt.as_ref(), None]
        .map(|extra| kv.match_prefix(content(extra), &mut Vec::new()).blocks);
    assert_eq!(hits, [1, 0, 0]);
}

#[test]
fn events_are_recorded_only_when_enabled() {
    let run = |events| {
        let config = KvConfig { events, ..config(64) };
        let mut kv = KvCache::new(&config).expect("a valid configuration");
        let tokens = [1; BLOCK_TOKENS as usize];
        let mut keys = Vec::new();
        config.block_hasher().extend_keys(&mut keys, &tokens, None);
        let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
        let mut tables = BlockTables::default();
        for _ in 0..2 {
            kv.grow(&mut tables, TableEntries::all(1));
            assert_eq!(kv.publish(&mut tables, 0, 0, content), PrefixCacheInsertOutcome::Stored);
            kv.free(&mut tables);
            kv.grow(&mut tables, TableEntries::all(BLOCKS)); // Evicts the block.
            kv.free(&mut tables);
        }
        kv.clear();
        kv.take_events().len()
    };
    assert_eq!([true, false].map(run), [5, 0], "stored and evicted twice, then cleared");
}
