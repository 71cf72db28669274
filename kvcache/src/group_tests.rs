//! Property tests of caches with several groups: a prefix hit ends where every group has the keys that later
//! queries read, and the blocks that a request holds are those with its own tokens.

use crate::{
    BlockKey, BlockTables, KvCache, KvConfig, PrefixHit, SequenceContent, TableEntries,
    WindowCheckpoints,
};
use proptest::prelude::*;
use protocol::{BlockHash, BlockId, KvEvent, KvGroup, KvKind, KvSpec, Token};
use std::collections::{BTreeMap, BTreeSet};

const BLOCK_TOKENS: u32 = 2;
const BLOCKS: u32 = 40;

/// A request with its computed positions.
struct GroupRequest {
    tokens: Vec<Token>,
    keys: Vec<BlockKey>,
    tables: BlockTables,
    computed: u32,
    published: u32,
}

impl GroupRequest {
    fn content(&self) -> SequenceContent<'_> {
        SequenceContent { tokens: &self.tokens, block_keys: &self.keys, extra_keys: None }
    }

    fn prefix(&self, blocks: u32) -> &[Token] {
        &self.tokens[..(blocks * BLOCK_TOKENS) as usize]
    }

    /// Registers the full blocks of the table of `group` before position `end` that are not registered yet.
    fn publish_full_blocks(&mut self, kv: &mut KvCache, group: u8, end: u32) {
        let held = self.tables.group(group.into()).first_held();
        for index in self.published.max(held)..end / BLOCK_TOKENS {
            let content =
                SequenceContent { tokens: &self.tokens, block_keys: &self.keys, extra_keys: None };
            kv.publish(&mut self.tables, group, index, content);
        }
    }
}

#[derive(Debug, Clone)]
enum GroupOp {
    /// Admits a request with these tokens, if its blocks fit.
    Start(Vec<Token>),
    /// Computes up to `.1` further tokens of request `.0`, and releases the blocks before its windows.
    Compute(usize, u32),
    /// Frees the blocks of a request.
    Free(usize),
    /// Clears the prefix indexes.
    Clear,
}

fn group_op() -> impl Strategy<Value = GroupOp> {
    let tokens = prop::collection::vec(0..2_u32, 1..18);
    prop_oneof![
        4 => tokens.prop_map(GroupOp::Start),
        6 => (any::<usize>(), 1..9_u32).prop_map(|(request, tokens)| GroupOp::Compute(request, tokens)),
        2 => any::<usize>().prop_map(GroupOp::Free),
        1 => Just(GroupOp::Clear),
    ]
}

fn kinds() -> impl Strategy<Value = Vec<KvKind>> {
    let windows = prop::collection::vec(1..9_u32, 1..4);
    (0..3_usize, windows).prop_map(|(kept, windows)| {
        let windows = windows.into_iter().map(|tokens| KvKind::Window { tokens });
        std::iter::repeat_n(KvKind::Full, kept).chain(windows).collect()
    })
}

/// The tested cache, its requests, and what the device has written to each block.
struct GroupRun {
    kv: KvCache,
    config: KvConfig,
    requests: Vec<GroupRequest>,
    /// Group and whole prefix of the last full block that was written to each block of the pool.
    written: BTreeMap<BlockId, (u8, Vec<Token>)>,
    /// Prefix index of each group, as a subscriber of KV events rebuilds it.
    event_index: BTreeSet<(u8, BlockHash)>,
}

impl GroupRun {
    fn new(kinds: Vec<KvKind>) -> Self {
        let group = |kind| KvGroup { layers: vec![0], kind, bytes_per_block: 1 };
        let spec =
            KvSpec { block_tokens: BLOCK_TOKENS, groups: kinds.into_iter().map(group).collect() };
        let config = KvConfig::new(spec, BLOCKS, [7, 8]);
        let kv = KvCache::new(&config).expect("a valid configuration");
        let (requests, written, event_index) = Default::default();
        Self { kv, config, requests, written, event_index }
    }

    fn kinds(&self) -> impl Iterator<Item = (u8, KvKind)> {
        (0..).zip(self.config.spec.groups.iter().map(|group| group.kind))
    }

    fn apply(&mut self, op: GroupOp) {
        match op {
            GroupOp::Start(tokens) => self.start(tokens),
            GroupOp::Compute(request, tokens) if !self.requests.is_empty() => {
                self.compute(request % self.requests.len(), tokens);
            }
            GroupOp::Free(request) if !self.requests.is_empty() => {
                let mut request = self.requests.swap_remove(request % self.requests.len());
                self.kv.free(&mut request.tables);
                assert!(request.tables.is_empty());
            }
            GroupOp::Clear => self.kv.clear(),
            GroupOp::Compute(..) | GroupOp::Free(_) => {}
        }
        self.apply_events();
        self.kv.check(self.requests.iter().map(|request| &request.tables));
        for (group, _) in self.kinds() {
            let of_events = self.event_index.iter().filter(|(g, _)| *g == group);
            let indexed: BTreeSet<_> = self.kv.indexed_hashes(group).collect();
            assert!(of_events.map(|(_, hash)| *hash).eq(indexed), "group {group}");
        }
    }

    fn start(&mut self, tokens: Vec<Token>) {
        let mut keys = Vec::new();
        self.config.block_hasher().extend_keys(&mut keys, &tokens, None);
        let tables = BlockTables::default();
        let mut request = GroupRequest { tokens, keys, tables, computed: 0, published: 0 };
        let mut found = Vec::new();
        let hit = self.kv.match_prefix(request.content(), &mut found);
        self.check_hit(&request, hit, &found);
        let entries = TableEntries {
            kept: self.kv.blocks_for(request.tokens.len() as u32),
            windowed: hit.blocks,
        };
        let needed = self.kv.blocks_to_grow(TableEntries::all(hit.blocks), entries);
        if needed + hit.evictable > self.kv.available_blocks() {
            return;
        }
        self.kv.pin(&mut request.tables, hit.blocks, &found);
        self.kv.grow(&mut request.tables, entries);
        (request.computed, request.published) = (hit.blocks * BLOCK_TOKENS, hit.blocks);
        self.requests.push(request);
    }

    /// Compares a hit with the longest one that the indexes, rebuilt from KV events, allow.
    fn check_hit(&self, request: &GroupRequest, hit: PrefixHit, found: &[BlockId]) {
        let blocks_max = (request.tokens.len() as u32 - 1) / BLOCK_TOKENS;
        let is_cached = |group: u8, block: u32| {
            self.event_index.contains(&(group, request.keys[block as usize].hash))
        };
        let reads = |kind: KvKind, blocks: u32| {
            (kind.first_read(blocks * BLOCK_TOKENS) / BLOCK_TOKENS).min(blocks)..blocks
        };
        let is_hit = |blocks: &u32| {
            self.kinds().all(|(g, kind)| reads(kind, *blocks).all(|block| is_cached(g, block)))
        };
        assert_eq!(Some(hit.blocks), (0..=blocks_max).rev().find(is_hit));
        assert_eq!(hit.cut_by.is_some(), hit.blocks < hit.wanted);
        assert_eq!(hit.found as usize, found.len());
        let expected = self.kinds().flat_map(|(group, kind)| {
            reads(kind, hit.blocks).map(move |block| (group, request.prefix(block + 1).to_vec()))
        });
        assert!(found.iter().map(|block| self.written[block].clone()).eq(expected));
        for (group, kind) in self.kinds() {
            let blocks_max = if kind == KvKind::Full { blocks_max } else { hit.wanted };
            let is_offered =
                |blocks: &u32| reads(kind, *blocks).all(|block| is_cached(group, block));
            let offered = self.kv.blocks_offered(group, request.content(), hit);
            let expected = (0..=blocks_max).rev().find(is_offered);
            assert_eq!(Some(offered), expected, "group {group} of {kind:?}, {hit:?}");
        }
    }

    fn compute(&mut self, at: usize, tokens: u32) {
        let Self { kv, requests, written, config, .. } = self;
        let request = &mut requests[at];
        let end = (request.computed + tokens).min(request.tokens.len() as u32);
        let entries = TableEntries { kept: 0, windowed: kv.blocks_for(end) };
        let current = TableEntries { kept: 0, windowed: kv.blocks_for(request.computed) };
        if kv.blocks_to_grow(current, entries) > kv.available_blocks() {
            return;
        }
        kv.grow(&mut request.tables, entries);
        for (group, table) in (0..).zip(request.tables.iter()) {
            for block in request.computed / BLOCK_TOKENS..kv.blocks_for(end) {
                let prefix = (block + 1) * BLOCK_TOKENS;
                let prefix = &request.tokens[..prefix.min(end) as usize];
                written.insert(table.blocks()[block as usize], (group, prefix.to_vec()));
            }
        }
        for group in 0..config.spec.groups.len() as u8 {
            request.publish_full_blocks(kv, group, end);
        }
        (request.computed, request.published) = (end, end / BLOCK_TOKENS);
        let checkpoints = WindowCheckpoints { prompt_end: 8, hit_end: 4, interval: 6 };
        kv.release_before_window(&mut request.tables, end, checkpoints);
        for (kind, table) in config.spec.groups.iter().map(|g| g.kind).zip(request.tables.iter()) {
            let first_read = kind.first_read(end) / BLOCK_TOKENS;
            assert!(table.first_held() <= first_read, "{kind:?} at {end}: {table:?}");
            let most = kind.blocks_of_request(end, 0, BLOCK_TOKENS);
            assert!(kind == KvKind::Full || table.held().len() as u32 <= most);
        }
    }

    fn apply_events(&mut self) {
        for event in self.kv.take_events() {
            match event {
                KvEvent::Stored { hashes, group, .. } => {
                    assert!(hashes.into_iter().all(|hash| self.event_index.insert((group, hash))));
                }
                KvEvent::Removed { hashes, group } => {
                    assert!(hashes.iter().all(|hash| self.event_index.remove(&(group, *hash))));
                }
                KvEvent::Cleared => self.event_index.clear(),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn hits_end_where_every_group_has_its_keys(
        kinds in kinds(),
        ops in prop::collection::vec(group_op(), 1..80),
    ) {
        let mut run = GroupRun::new(kinds);
        for op in ops {
            run.apply(op);
        }
    }
}

#[test]
fn groups_offer_more_than_the_hit_that_they_give() {
    // A window of three tokens needs the last block before the end of a hit.
    let window = KvKind::Window { tokens: 3 };
    let mut run = GroupRun::new(vec![KvKind::Full, window, window]);
    run.start((0..17).collect());
    let mut request = run.requests.pop().expect("a request");
    run.kv.grow(&mut request.tables, TableEntries::all(9));
    for (group, cached) in [(0, &[0, 1, 2, 3, 4, 5, 6, 7][..]), (1, &[1, 4]), (2, &[1, 3])] {
        let GroupRequest { tokens, keys, tables, .. } = &mut request;
        for &index in cached {
            let content = SequenceContent { tokens, block_keys: keys, extra_keys: None };
            run.kv.publish(tables, group, index, content);
        }
    }
    let hit = run.kv.match_prefix(request.content(), &mut Vec::new());
    // Hits may end after two or five blocks in group 1, and after two or four blocks in group 2.
    assert_eq!((hit.wanted, hit.blocks, hit.cut_by), (8, 2, Some(1)));
    let offered = [0, 1, 2].map(|group| run.kv.blocks_offered(group, request.content(), hit));
    assert_eq!(offered, [8, 5, 4]);
}

#[test]
fn windows_without_checkpoint_are_evicted_first() {
    let run = |prompt_end| {
        let mut run = GroupRun::new(vec![KvKind::Full, KvKind::Window { tokens: 3 }]);
        run.start((0..16).collect());
        for _ in 0..8 {
            let request = &mut run.requests[0];
            let end = request.computed + 2;
            run.kv.grow(&mut request.tables, TableEntries { kept: 0, windowed: end / 2 });
            for group in [0, 1] {
                let GroupRequest { tokens, keys, tables, .. } = request;
                let content = SequenceContent { tokens, block_keys: keys, extra_keys: None };
                run.kv.publish(tables, group, end / 2 - 1, content);
            }
            let checkpoints = WindowCheckpoints { prompt_end, hit_end: 0, interval: 0 };
            run.kv.release_before_window(&mut request.tables, end, checkpoints);
            request.computed = end;
        }
        run.kv.evictable_blocks().map(|block| block.0).collect::<Vec<_>>()
    };
    // Window blocks have the ids 8 to 15; the last one is held for the position after the request.
    assert_eq!(run(0), [14, 13, 12, 11, 10, 9, 8]);
    assert_eq!(
        run(8),
        [14, 13, 12, 10, 9, 8, 11],
        "a hit of eight tokens reads the block of 6 and 7"
    );
}
