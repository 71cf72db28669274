//! The cache against a model that keeps whole prefixes instead of hashes, lists instead of links.

use crate::{BlockKey, Content, ExtraKeys, KvCache, KvConfig, Published, Share, Stay, Table};
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
    let residency = Share::new(1.0);
    KvConfig { hash_bits, residency, ..KvConfig::new(spec, BLOCKS, [7, 8]) }
}

/// Everything a block's KV depends on.
type Prefix = (Option<String>, Vec<Token>);

/// A request: its content, its table, and how many of its blocks are published.
struct Holder {
    tokens: Vec<Token>,
    keys: Vec<BlockKey>,
    extra: Option<Arc<ExtraKeys>>,
    table: Table,
    published: u32,
    publishing: bool,
}

impl Holder {
    fn prefix(&self, blocks: u32) -> Prefix {
        let salt = self.extra.as_ref().and_then(|extra| extra.salt.clone());
        (salt, self.tokens[..(blocks * BLOCK_TOKENS) as usize].to_vec())
    }

    fn content(&self) -> Content<'_> {
        Content { tokens: &self.tokens, keys: &self.keys, extra: self.extra.as_ref() }
    }
}

/// What should be: free blocks in the order in which they are taken, and who is findable as what.
#[derive(Default)]
struct Model {
    vacant: BTreeSet<u32>,
    cached: Vec<u32>,
    refs: BTreeMap<u32, u32>,
    findable: BTreeMap<Prefix, u32>,
    now_ms: u64,
    /// When each block was taken, and used again; vacant ones are not there.
    lives: BTreeMap<u32, Vec<u64>>,
    /// Lives that an eviction has ended.
    stays: Vec<Stay>,
}

impl Model {
    fn take(&mut self) -> u32 {
        let block = self.vacant.pop_first().unwrap_or_else(|| {
            let oldest = self.cached.remove(0);
            self.findable.retain(|_, &mut block| block != oldest);
            let life = self.lives.remove(&oldest).expect("a cached block was taken once");
            self.stays.push(stay(&life, self.now_ms));
            oldest
        });
        self.lives.insert(block, vec![self.now_ms]);
        self.refs.insert(block, 1);
        block
    }

    fn claim(&mut self, block: u32) {
        self.cached.retain(|&other| other != block);
        self.lives.get_mut(&block).expect("claimed while it is findable").push(self.now_ms);
        *self.refs.entry(block).or_default() += 1;
    }

    fn release(&mut self, block: u32) {
        let refs = self.refs.get_mut(&block).expect("held");
        *refs -= 1;
        if *refs > 0 {
            return;
        }
        if self.findable.values().any(|&other| other == block) {
            self.cached.push(block);
        } else {
            self.lives.remove(&block);
            self.vacant.insert(block);
        }
    }
}

/// What a life comes to, from its moments in full.
fn stay(life: &[u64], now_ms: u64) -> Stay {
    let uses = &life[1..];
    let gaps: Vec<u64> = uses.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let kept = gaps.len().saturating_sub(3);
    Stay {
        lifetime_ms: now_ms - life[0],
        idle_ms: now_ms - life[life.len() - 1],
        gaps_ms: gaps[kept..].to_vec(),
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// Starts a request with these ids and perhaps a salt, if its blocks fit.
    Start(Vec<Token>, bool),
    /// Publishes up to so many further blocks of a request.
    Publish(usize, u32),
    /// Ends a request.
    Free(usize),
    /// Forgets every prefix.
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    // Few ids and short prompts: prefixes must meet.
    let tokens = prop::collection::vec(0..2_u32, 1..9);
    prop_oneof![
        4 => (tokens, any::<bool>()).prop_map(|(tokens, salted)| Op::Start(tokens, salted)),
        4 => (any::<usize>(), 1..4_u32).prop_map(|(holder, blocks)| Op::Publish(holder, blocks)),
        3 => any::<usize>().prop_map(Op::Free),
        1 => Just(Op::Clear),
    ]
}

struct Run {
    kv: KvCache,
    model: Model,
    holders: Vec<Holder>,
    /// The index as a subscriber of the events rebuilds it.
    mirror: BTreeSet<BlockHash>,
    config: KvConfig,
    /// Hashes are whole, so that the model foresees every outcome.
    exact: bool,
}

impl Run {
    fn new(hash_bits: u8) -> Self {
        let config = config(hash_bits);
        let kv = KvCache::new(&config).expect("a valid configuration");
        let model = Model { vacant: (0..BLOCKS).collect(), ..Model::default() };
        let exact = hash_bits == 64;
        Self { kv, model, holders: Vec::new(), mirror: BTreeSet::new(), config, exact }
    }

    fn apply(&mut self, op: Op) {
        self.model.now_ms += 1 << (self.model.lives.len() % 7);
        self.kv.set_time(self.model.now_ms);
        match op {
            Op::Start(tokens, salted) => self.start(tokens, salted),
            Op::Publish(holder, blocks) if !self.holders.is_empty() => {
                let holder = holder % self.holders.len();
                (0..blocks).for_each(|_| self.publish(holder));
            }
            Op::Free(holder) if !self.holders.is_empty() => {
                let mut holder = self.holders.swap_remove(holder % self.holders.len());
                for block in holder.table.blocks().iter().rev() {
                    self.model.release(block.0);
                }
                self.kv.free(&mut holder.table);
            }
            Op::Clear => {
                self.kv.clear();
                self.model.findable.clear();
                let cached = std::mem::take(&mut self.model.cached);
                self.model.lives.retain(|block, _| !cached.contains(block));
                self.model.vacant.extend(cached);
            }
            Op::Publish(..) | Op::Free(_) => {}
        }
        self.follow_events();
        assert_eq!(self.kv.has_stays(), !self.model.stays.is_empty());
        assert_eq!(self.kv.take_stays(), std::mem::take(&mut self.model.stays));
        self.compare();
    }

    fn start(&mut self, tokens: Vec<Token>, salted: bool) {
        let extra = ExtraKeys::salted(salted.then(|| "tenant".to_owned()));
        let mut keys = Vec::new();
        self.config.hasher().extend(&mut keys, &tokens, extra.as_deref());
        let (table, publishing) = (Table::default(), true);
        let mut holder = Holder { tokens, keys, extra, table, published: 0, publishing };
        let mut found = Vec::new();
        let hit = self.kv.match_prefix(holder.content(), &mut found);
        for (i, &BlockId(block)) in found.iter().enumerate() {
            let expected = self.model.findable.get(&holder.prefix(i as u32 + 1));
            assert_eq!(expected, Some(&block), "a hit holds another prefix");
        }
        let longest = (holder.tokens.len() as u32 - 1) / BLOCK_TOKENS;
        let known = |&blocks: &u32| self.model.findable.contains_key(&holder.prefix(blocks));
        if self.exact {
            assert_eq!(hit.blocks, (1..=longest).take_while(known).count() as u32);
        }
        let idle = found.iter().filter(|block| self.model.cached.contains(&block.0)).count();
        assert_eq!(hit.idle, idle as u32);
        let blocks = self.kv.blocks_for(holder.tokens.len() as u32);
        if blocks - hit.blocks + hit.idle > self.kv.available() {
            return;
        }
        for block in &found {
            self.model.claim(block.0);
        }
        self.kv.claim(&mut holder.table, &found);
        let fresh: Vec<u32> = (hit.blocks..blocks).map(|_| self.model.take()).collect();
        self.kv.grow(&mut holder.table, blocks - hit.blocks);
        let taken = holder.table.blocks()[hit.blocks as usize..].iter().map(|block| block.0);
        assert!(taken.eq(fresh), "other blocks were taken than the vacant lowest and the LRU");
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
        let own = holder.table.blocks()[index as usize].0;
        let prefix = holder.prefix(index + 1);
        let parent_is_findable = index == 0 || {
            let parent = holder.table.blocks()[index as usize - 1].0;
            self.model.findable.values().any(|&block| block == parent)
        };
        let content =
            Content { tokens: &holder.tokens, keys: &holder.keys, extra: holder.extra.as_ref() };
        let outcome = self.kv.publish(&mut holder.table, index, content);
        let known = self.model.findable.get(&prefix).copied();
        match outcome {
            Published::Stored => {
                assert!(parent_is_findable && known.is_none());
                self.model.findable.insert(prefix, own);
            }
            Published::Adopted => {
                let known = known.expect("only an equal block is adopted");
                assert_eq!(holder.table.blocks()[index as usize].0, known);
                self.model.claim(known);
                self.model.release(own);
            }
            Published::Refused => {
                assert!(!parent_is_findable || !self.exact, "refused without a reason");
                holder.publishing = false;
                return;
            }
        }
        holder.published += 1;
    }

    fn follow_events(&mut self) {
        let told = self.kv.has_events();
        let events = self.kv.take_events();
        assert_eq!((told, self.kv.has_events()), (!events.is_empty(), false));
        for event in events {
            match event {
                KvEvent::Stored { hashes, parent, tokens, extra_keys, .. } => {
                    assert!(parent.is_none_or(|parent| self.mirror.contains(&parent)));
                    assert_eq!(tokens.len(), hashes.len() * BLOCK_TOKENS as usize);
                    assert_eq!(extra_keys.len(), hashes.len());
                    for hash in hashes {
                        assert!(self.mirror.insert(hash), "stored twice");
                    }
                }
                KvEvent::Removed { hashes, .. } => {
                    let known = hashes.iter().all(|hash| self.mirror.remove(hash));
                    assert!(known, "removed without being stored");
                }
                KvEvent::Cleared => self.mirror.clear(),
            }
        }
    }

    fn compare(&self) {
        self.kv.check(self.holders.iter().map(|holder| &holder.table));
        let counts = self.kv.counts();
        let (vacant, cached) = (self.model.vacant.len(), self.model.cached.len());
        assert_eq!((counts.vacant as usize, counts.cached as usize), (vacant, cached));
        let findable: BTreeSet<u32> = self.model.findable.values().copied().collect();
        let found = (0..BLOCKS).filter(|&block| self.kv.is_findable(BlockId(block)));
        assert!(found.eq(findable), "other blocks can be found");
        assert_eq!(self.mirror.len(), self.model.findable.len(), "events and index differ");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn agrees_with_the_model(ops in prop::collection::vec(op(), 1..60)) {
        let mut run = Run::new(64);
        for op in ops {
            run.apply(op);
        }
    }

    #[test]
    fn colliding_hashes_cost_hits_but_never_correctness(
        ops in prop::collection::vec(op(), 1..60),
        bits in 1..6_u8,
    ) {
        let mut run = Run::new(bits);
        for op in ops {
            run.apply(op);
        }
    }
}

/// Runs `ops` on four blocks and renders what is left: `vacant | cached, oldest first`.
fn check(ops: &[&str], expected: &Expect) {
    let mut config = config(64);
    config.blocks = 4;
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let mut tables: BTreeMap<char, Table> = BTreeMap::new();
    for op in ops {
        let (verb, who) = op.split_once(' ').expect("`verb name`");
        let name = who.chars().next().expect("a name");
        let tokens = vec![u32::from(name); BLOCK_TOKENS as usize + 1];
        let mut keys = Vec::new();
        config.hasher().extend(&mut keys, &tokens, None);
        let content = Content { tokens: &tokens, keys: &keys, extra: None };
        let table = tables.entry(name).or_default();
        match verb {
            "take" => kv.grow(table, 1),
            "publish" => assert_eq!(kv.publish(table, 0, content), Published::Stored),
            "free" => kv.free(table),
            "hit" => {
                let mut found = Vec::new();
                kv.match_prefix(content, &mut found);
                kv.claim(table, &found);
            }
            verb => panic!("unknown verb {verb}"),
        }
    }
    let held = tables.iter().flat_map(|(name, table)| {
        table.blocks().iter().map(move |block| format!("{name}={}", block.0))
    });
    let held: Vec<String> = held.collect();
    let cached: Vec<String> = kv.idle_blocks().map(|block| block.0.to_string()).collect();
    let vacant = kv.counts().vacant;
    let text = format!("{} | vacant {vacant} | cached {}", held.join(" "), cached.join(" "));
    expected.assert_eq(text.trim());
}

#[test]
fn lru_order_table() {
    // Vacant blocks go first, lowest id first; a freed block without a hash is vacant again.
    check(&["take a", "take b", "free a", "take c"], &expect!["b=1 c=0 | vacant 2 | cached"]);
    // A findable block is cached when freed, and not spent while a vacant one waits.
    let ab = ["take a", "publish a", "take b", "publish b", "free a", "free b"];
    check(&ab, &expect!["| vacant 2 | cached 0 1"]);
    check(&[&ab[..], &["take c"]].concat(), &expect!["c=2 | vacant 1 | cached 0 1"]);
    // A hit leaves its place, and comes back as the newest.
    check(&[&ab[..], &["hit a"]].concat(), &expect!["a=0 | vacant 2 | cached 1"]);
    check(&[&ab[..], &["hit a", "free a"]].concat(), &expect!["| vacant 2 | cached 1 0"]);
    // Then the longest idle one is evicted.
    let full = [&ab[..], &["hit a", "free a", "take c", "take c", "take d"]].concat();
    check(&full, &expect!["c=2 c=3 d=1 | vacant 0 | cached 0"]);
}

#[test]
fn tables_are_evicted_leaf_first() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens: Vec<Token> = (0..6).collect();
    let mut keys = Vec::new();
    config.hasher().extend(&mut keys, &tokens, None);
    let content = Content { tokens: &tokens, keys: &keys, extra: None };
    let mut table = Table::default();
    kv.grow(&mut table, 3);
    for index in [0, 1, 0, 2] {
        assert_eq!(kv.publish(&mut table, index, content), Published::Stored, "once or again");
    }
    assert_eq!((kv.published(), table.is_empty()), (3, false));
    kv.free(&mut table);
    assert!(table.is_empty());
    kv.take_events();
    kv.grow(&mut table, BLOCKS);
    let removed: Vec<BlockHash> = keys.iter().rev().map(|key| key.hash).collect();
    assert_eq!(kv.take_events(), [KvEvent::Removed { hashes: removed, group: 0 }]);
}

#[test]
fn publishing_stops_where_the_parent_is_gone() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens: Vec<Token> = (0..4).collect();
    let mut keys = Vec::new();
    config.hasher().extend(&mut keys, &tokens, None);
    let content = Content { tokens: &tokens, keys: &keys, extra: None };
    let mut table = Table::default();
    kv.grow(&mut table, 2);
    assert_eq!(kv.publish(&mut table, 0, content), Published::Stored);
    kv.clear();
    assert_eq!(kv.publish(&mut table, 1, content), Published::Refused, "a false root");
    kv.check([&table].into_iter());
}

#[test]
fn blocks_are_followed_only_where_asked_for_and_findable() {
    let run = |residency, caching| {
        let config = KvConfig { caching, residency, ..config(64) };
        let mut kv = KvCache::new(&config).expect("a valid configuration");
        let mut stays = 0;
        for n in 0..1_000 {
            let tokens = vec![n; BLOCK_TOKENS as usize];
            let mut keys = Vec::new();
            config.hasher().extend(&mut keys, &tokens, None);
            let content = Content { tokens: &tokens, keys: &keys, extra: None };
            let mut table = Table::default();
            kv.grow(&mut table, 1);
            if caching {
                assert_eq!(kv.publish(&mut table, 0, content), Published::Stored);
            }
            kv.free(&mut table);
            stays += kv.take_stays().len();
        }
        stays
    };
    assert_eq!((run(None, true), run(Share::new(1.0), false)), (0, 0));
    let evicted = 1_000 - BLOCKS as usize;
    assert_eq!(run(Share::new(1.0), true), evicted);
    let half = run(Share::new(0.5), true);
    assert!((evicted * 4 / 10..evicted * 6 / 10).contains(&half), "{half} of {evicted}");
}

/// A submitter may hand in keys that are not of its salt: blocks of another tenant are none of its own even then.
#[test]
fn a_hit_needs_equal_extra_keys_even_under_equal_block_keys() {
    let config = config(64);
    let mut kv = KvCache::new(&config).expect("a valid configuration");
    let tokens = [1; BLOCK_TOKENS as usize + 1];
    let [own, other] = ["own", "other"].map(|salt| ExtraKeys::salted(Some(salt.to_owned())));
    let mut keys = Vec::new();
    config.hasher().extend(&mut keys, &tokens, own.as_deref());
    let content = |extra| Content { tokens: &tokens, keys: &keys, extra };
    let mut table = Table::default();
    kv.grow(&mut table, 1);
    assert_eq!(kv.publish(&mut table, 0, content(own.as_ref())), Published::Stored);
    let hits = [own.as_ref(), other.as_ref(), None]
        .map(|extra| kv.match_prefix(content(extra), &mut Vec::new()).blocks);
    assert_eq!(hits, [1, 0, 0]);
}

#[test]
fn changes_of_the_index_are_recorded_only_where_asked_for() {
    let run = |events| {
        let config = KvConfig { events, ..config(64) };
        let mut kv = KvCache::new(&config).expect("a valid configuration");
        let tokens = [1; BLOCK_TOKENS as usize];
        let mut keys = Vec::new();
        config.hasher().extend(&mut keys, &tokens, None);
        let content = Content { tokens: &tokens, keys: &keys, extra: None };
        let mut table = Table::default();
        for _ in 0..2 {
            kv.grow(&mut table, 1);
            assert_eq!(kv.publish(&mut table, 0, content), Published::Stored);
            kv.free(&mut table);
            kv.grow(&mut table, BLOCKS); // Evicts it.
            kv.free(&mut table);
        }
        kv.clear();
        kv.take_events().len()
    };
    assert_eq!([true, false].map(run), [5, 0], "stored and evicted twice, then cleared");
}
