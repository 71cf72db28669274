//! Property tests of caches with state groups: a request resumes from the state of its own prefix, and no slot is
//! written while another row needs its contents.

use crate::{
    BlockKey, BlockTables, KvCache, KvConfig, SequenceContent, StateRow, StateSlots, TableEntries,
};
use proptest::prelude::*;
use protocol::{KvGroup, KvKind, KvSpec, StateSlotAccess, Token};
use std::collections::BTreeMap;

const BLOCK_TOKENS: u32 = 2;
const BLOCKS: u32 = 24;
const STATE_SLOTS: u32 = 7;

/// A request whose rows are applied immediately.
struct StateRequest {
    tokens: Vec<Token>,
    keys: Vec<BlockKey>,
    tables: BlockTables,
    slots: StateSlots,
    computed: u32,
    published: u32,
}

#[derive(Debug, Clone)]
enum StateOp {
    /// Admits a request with these tokens, if its blocks and slots fit; with a spare slot if `.1`.
    Start(Vec<Token>, bool),
    /// Runs a row of up to `tokens` tokens. The state before the row becomes a checkpoint if `checkpoint`; if
    /// `repeat`, the row has to be repeated.
    Run { request: usize, tokens: u32, checkpoint: bool, repeat: bool },
    /// Frees the blocks and slots of a request.
    Free(usize),
    /// Clears the prefix indexes.
    Clear,
}

fn state_op() -> impl Strategy<Value = StateOp> {
    let tokens = prop::collection::vec(0..2_u32, 1..14);
    let run = (any::<usize>(), 1..5_u32, any::<bool>(), any::<bool>());
    prop_oneof![
        3 => (tokens, any::<bool>()).prop_map(|(tokens, spare)| StateOp::Start(tokens, spare)),
        8 => run.prop_map(|(request, tokens, checkpoint, repeat)| {
            StateOp::Run { request, tokens, checkpoint, repeat }
        }),
        2 => any::<usize>().prop_map(StateOp::Free),
        1 => Just(StateOp::Clear),
    ]
}

/// The tested cache, its requests, and the tokens that have been folded into the state of each slot.
struct StateRun {
    kv: KvCache,
    config: KvConfig,
    requests: Vec<(StateRequest, bool)>,
    states: BTreeMap<(u8, u32), Vec<Token>>,
    hits: u32,
}

fn config(state_groups: usize, state_slots: u32) -> KvConfig {
    let state = KvKind::State { slots_per_request: 1, bytes_per_slot: 8 };
    let kinds = [KvKind::Full].into_iter().chain(std::iter::repeat_n(state, state_groups));
    let group = |kind: KvKind| {
        let bytes_per_block = u64::from(!kind.is_state());
        KvGroup { layers: vec![0], kind, bytes_per_block }
    };
    let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: kinds.map(group).collect() };
    KvConfig { state_slots, ..KvConfig::new(spec, BLOCKS, [7, 8]) }
}

impl StateRun {
    fn new(state_groups: usize) -> Self {
        let config = config(state_groups, STATE_SLOTS);
        let kv = KvCache::new(&config).expect("a valid configuration");
        Self { kv, config, requests: Vec::new(), states: BTreeMap::new(), hits: 0 }
    }

    fn apply(&mut self, op: StateOp) {
        let count = self.requests.len();
        match op {
            StateOp::Start(tokens, spare) => self.start(tokens, spare),
            StateOp::Run { request, tokens, checkpoint, repeat } if count > 0 => {
                self.run(request % count, tokens, checkpoint, repeat);
            }
            StateOp::Free(request) if count > 0 => {
                let (mut request, _) = self.requests.swap_remove(request % count);
                self.kv.free(&mut request.tables);
                self.kv.states_mut().free(&mut request.slots);
            }
            StateOp::Clear if count == 0 => self.kv.clear(),
            StateOp::Run { .. } | StateOp::Free(_) | StateOp::Clear => {}
        }
        self.kv.check(self.requests.iter().map(|(request, _)| &request.tables));
        self.kv.check_states(self.requests.iter().map(|(request, _)| &request.slots));
    }

    fn start(&mut self, tokens: Vec<Token>, spare: bool) {
        let mut keys = Vec::new();
        self.config.block_hasher().extend_keys(&mut keys, &tokens, None);
        let content = SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: None };
        let mut found = Vec::new();
        let hit = self.kv.match_prefix(content, &mut found);
        let entries = TableEntries::all(self.kv.blocks_for(tokens.len() as u32));
        let needed = self.kv.blocks_to_grow(TableEntries::all(hit.blocks), entries);
        let slots_needed = 1 + u32::from(spare) + hit.evictable_states;
        if needed + hit.evictable > self.kv.available_blocks()
            || slots_needed > self.kv.states().available()
        {
            return;
        }
        let (mut tables, mut slots) = (BlockTables::default(), StateSlots::default());
        self.kv.pin(&mut tables, hit.blocks, &found);
        if hit.blocks > 0 {
            let key = keys[hit.blocks as usize - 1];
            self.kv.states_mut().pin(&mut slots, key, hit.blocks * BLOCK_TOKENS);
            self.hits += 1;
        }
        self.kv.grow(&mut tables, entries);
        self.kv.states_mut().allocate(&mut slots, spare);
        let (computed, published) = (hit.blocks * BLOCK_TOKENS, hit.blocks);
        self.requests
            .push((StateRequest { tokens, keys, tables, slots, computed, published }, spare));
    }

    fn run(&mut self, at: usize, tokens: u32, checkpoint: bool, repeat: bool) {
        let Self { kv, requests, states, .. } = self;
        let (request, spare) = &mut requests[at];
        let (start, len) = (request.computed, request.tokens.len() as u32);
        let end = (start + tokens).min(len);
        if start == end {
            return;
        }
        let checkpoint = checkpoint && start.is_multiple_of(BLOCK_TOKENS);
        let row = StateRow { start, checkpoint, may_repeat: *spare };
        let accesses = kv.states_mut().access(&mut request.slots, row);
        for &StateSlotAccess { group, read, write } in &accesses {
            let read = read.map(|slot| states[&(group, slot.0)].clone()).unwrap_or_default();
            assert_eq!(read, request.tokens[..start as usize], "state before {start}");
            states.insert((group, write.0), request.tokens[..end as usize].to_vec());
        }
        request.computed = if *spare && repeat { start } else { end };
        for index in request.published..request.computed / BLOCK_TOKENS {
            let StateRequest { tokens, keys, tables, .. } = &mut *request;
            let content = SequenceContent { tokens, block_keys: keys, extra_keys: None };
            kv.publish(tables, 0, index, content);
        }
        request.published = request.computed / BLOCK_TOKENS;
        let (computed, published) = (request.computed, request.published * BLOCK_TOKENS);
        kv.states_mut().settle(&mut request.slots, computed, published, &request.keys);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn rows_read_the_state_of_their_prefix(
        state_groups in 1..3_usize,
        ops in prop::collection::vec(state_op(), 1..80),
    ) {
        let mut run = StateRun::new(state_groups);
        for op in ops {
            run.apply(op);
        }
    }
}

/// Runs a request over `tokens` in rows of one block, each of which begins at a checkpoint, and frees it.
fn compute(run: &mut StateRun, tokens: &[Token]) {
    run.apply(StateOp::Start(tokens.to_vec(), false));
    for _ in 0..=tokens.len() as u32 / BLOCK_TOKENS {
        let row =
            StateOp::Run { request: 0, tokens: BLOCK_TOKENS, checkpoint: true, repeat: false };
        run.apply(row);
    }
    run.apply(StateOp::Free(0));
}

fn hit(run: &StateRun, tokens: &[Token]) -> [u32; 2] {
    let mut keys = Vec::new();
    run.config.block_hasher().extend_keys(&mut keys, tokens, None);
    let content = SequenceContent { tokens, block_keys: &keys, extra_keys: None };
    let hit = run.kv.match_prefix(content, &mut Vec::new());
    assert_eq!(hit.cut_by, (hit.blocks < hit.wanted).then_some(1));
    let offered = [0, 1].map(|group| run.kv.blocks_offered(group, content, hit));
    assert_eq!(offered, [hit.wanted, hit.blocks], "the state group alone cuts the hit");
    [hit.blocks, hit.wanted]
}

#[test]
fn hits_end_at_checkpoints() {
    let mut run = StateRun::new(1);
    compute(&mut run, &[1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(run.hits, 0);
    assert_eq!(hit(&run, &[1, 2, 3, 4, 5, 6, 7]), [3, 3]);
    assert_eq!(hit(&run, &[1, 2, 3, 4, 5, 6]), [2, 2], "the last token is computed");
    assert_eq!(hit(&run, &[1, 2, 9, 4, 5, 6]), [1, 1]);
    // No row of this request begins at a checkpoint, so that its own tokens add no state.
    run.apply(StateOp::Start(vec![1, 2, 8, 8, 8, 8, 8], false));
    for _ in 0..5 {
        run.apply(StateOp::Run { request: 0, tokens: 3, checkpoint: false, repeat: false });
    }
    run.apply(StateOp::Free(0));
    assert_eq!((run.hits, hit(&run, &[1, 2, 8, 8, 8, 8, 8])), (1, [1, 3]));
}

#[test]
fn checkpoints_are_evicted_in_order_of_use() {
    let mut run = StateRun::new(1);
    compute(&mut run, &[1, 1, 1, 1, 1, 1, 1]);
    compute(&mut run, &[2, 2, 2, 2, 2, 2, 2]);
    let counts = run.kv.states().counts(0);
    assert_eq!((counts.pool, counts.free, counts.checkpoints, counts.in_use), (7, 1, 6, 0));
    // The hit makes the second checkpoint of the first request the one that was used last. The request takes two
    // slots: the free one, and that of the oldest checkpoint.
    compute(&mut run, &[1, 1, 1, 1, 3, 3, 3]);
    assert_eq!(hit(&run, &[1, 1, 1]), [0, 1]);
    assert_eq!(hit(&run, &[1, 1, 1, 1, 1]), [2, 2]);
    assert_eq!(hit(&run, &[1, 1, 1, 1, 3, 3, 3]), [3, 3]);
}

#[test]
fn evicted_blocks_drop_their_checkpoints() {
    let mut run = StateRun::new(2);
    compute(&mut run, &[1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(run.kv.states().counts(1).checkpoints, 3);
    run.kv.grow(&mut BlockTables::default(), TableEntries::all(BLOCKS - 1));
    let checkpoints = [0, 1].map(|group| run.kv.states().counts(group).checkpoints);
    assert_eq!(checkpoints, [1, 1], "the checkpoint of the cached block is left");
}
