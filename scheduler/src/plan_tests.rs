//! Tests of `plan`. A scenario is one line `settings | run .. | wait .. | cache ..`, each section optional.
//!
//! `a 8/9` is request `a` with 8 of 9 tokens computed; `b=a 0/9` has the same tokens as `a`; `a! ..` is
//! non-preemptible, with blocks up to its length limit (8 more tokens) reserved. Running requests hold the
//! blocks that were allocated at their admission, and their computed full blocks are registered in the prefix
//! cache. `cache a 8` leaves the first 8 tokens of `a` cached and unreferenced. `free` is the number of
//! additional free blocks.

use super::*;
use crate::commit::{commit, write_batch_rows};
use crate::mask_state::GrammarMaskState;
use crate::request::PREEMPTIONS_MAX;
use crate::request_queue::QueueKey;
use crate::{RequestSubmission, SchedulerConfig};
use expect_test::{Expect, expect};
use kvcache::{BlockTables, KvConfig, PrefixCacheInsertOutcome, SequenceContent};
use protocol::{KvGroup, KvKind, KvSpec, Replica, Token};

/// Scenario of a planner test: scheduling state, KV cache and limits.
struct PlanScenario {
    state: ReplicaRequests,
    kv: KvCache,
    limits: SchedulerLimits,
    /// Block tables that hold surplus blocks: running requests that share prefixes need fewer blocks, and
    /// without these tables more blocks would be free than the scenario's `free`.
    parked_blocks: BlockTables,
}

/// A request parsed from a scenario, for example `b=a 4/9`: its name, the request whose tokens it has,
/// whether it is non-preemptible, and its numbers of computed and known tokens.
struct ScenarioRequest {
    name: u8,
    same_tokens_as: u8,
    computed: u32,
    known_len: u32,
    non_preemptible: bool,
}

fn tokens(token_source: u8, count: u32) -> Vec<Token> {
    (0..count).map(|i| u32::from(token_source) * 1_000 + i).collect()
}

fn parse_request(text: &str) -> ScenarioRequest {
    let (label, numbers) = text.trim().split_once(' ').expect("`name numbers`");
    let (computed, known_len) = numbers.split_once('/').unwrap_or(("0", numbers));
    let number = |text: &str| text.parse().expect("a number");
    let name = label.as_bytes()[0];
    let token_source =
        label.split_once('=').map_or(name, |(_, token_source)| token_source.as_bytes()[0]);
    let non_preemptible = label.contains('!');
    ScenarioRequest {
        name,
        same_tokens_as: token_source,
        computed: number(computed),
        known_len: number(known_len),
        non_preemptible,
    }
}

fn parse_section<'a>(text: &'a str, name: &str) -> impl Iterator<Item = ScenarioRequest> + use<'a> {
    let section = text.split('|').find_map(|section| section.trim().strip_prefix(name));
    section.unwrap_or("").split(',').filter(|entry| !entry.trim().is_empty()).map(parse_request)
}

fn parse_setting(text: &str, name: &str) -> Option<u32> {
    let settings = text.split('|').next()?;
    let value = settings.split_whitespace().find_map(|word| word.strip_prefix(name))?;
    Some(value.parse().expect("a number"))
}

fn parse_limits(text: &str) -> SchedulerLimits {
    let mut limits = SchedulerLimits::cpu(10_000, u32::MAX);
    limits.tokens_per_step = parse_setting(text, "step=").unwrap_or(64);
    limits.tokens_per_chunk = parse_setting(text, "chunk=");
    limits.max_num_seqs = parse_setting(text, "slots=").unwrap_or(16);
    limits.draft_tokens = parse_setting(text, "drafts=").unwrap_or(0) as u8;
    limits
}

fn scenario(text: &str) -> PlanScenario {
    let block_tokens = parse_setting(text, "block=").unwrap_or(4);
    let limits = parse_limits(text);
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens, groups: vec![group] };
    let blocks_in_use: u32 =
        parse_section(text, "run").map(|r| running_blocks(&r, block_tokens)).sum();
    let cached: u32 = parse_section(text, "cache").map(|c| c.known_len / block_tokens).sum();
    let blocks = blocks_in_use + cached + parse_setting(text, "free=").unwrap_or(100);
    let config = KvConfig::new(spec, blocks, [1, 2]);
    let mut scenario = PlanScenario {
        state: ReplicaRequests::new(Replica(0), limits.max_num_seqs, &config),
        kv: KvCache::new(&config).unwrap(),
        limits,
        parked_blocks: BlockTables::default(),
    };
    let config = SchedulerConfig::new(scenario.limits.clone(), config);
    for cached in parse_section(text, "cache") {
        let len = cached.known_len;
        let mut tables = scenario.fill(&tokens(cached.same_tokens_as, len), len);
        scenario.kv.free(&mut tables);
    }
    for (arrival, entry) in parse_section(text, "run").enumerate() {
        scenario.run(&entry, arrival as u64, &config);
    }
    let saved = scenario.kv.available_blocks() - (blocks - blocks_in_use);
    scenario.kv.grow(&mut scenario.parked_blocks, TableEntries::all(saved));
    for (arrival, entry) in parse_section(text, "wait").enumerate() {
        scenario.state.enqueue(request(&entry, 100 + arrival as u64, &config));
    }
    scenario
}

/// Returns the number of blocks that a running request holds: for its known length, or for its computed
/// length if it decodes.
fn running_blocks(entry: &ScenarioRequest, block_tokens: u32) -> u32 {
    let decodes = entry.known_len - entry.computed == 1;
    let positions = if decodes { entry.computed } else { entry.known_len };
    positions.div_ceil(block_tokens)
}

fn request(entry: &ScenarioRequest, arrival: u64, config: &SchedulerConfig) -> Request {
    let tokens = tokens(entry.same_tokens_as, entry.known_len);
    let submit =
        RequestSubmission::greedy(u64::from(entry.name), tokens, &config.kv.block_hasher());
    let mut request = Request::new(submit, arrival, 0, config);
    request.cold_fields.queue_key = QueueKey { priority: 0, arrival };
    request.non_preemptible = entry.non_preemptible;
    request
}

impl PlanScenario {
    /// Allocates a block table for `tokens` and registers its full blocks below position `computed` in the
    /// prefix cache.
    fn fill(&mut self, tokens: &[Token], computed: u32) -> BlockTables {
        let mut keys = Vec::new();
        self.state.hasher.extend_keys(&mut keys, tokens, None);
        let mut tables = BlockTables::default();
        let entries = self.kv.blocks_for(tokens.len() as u32);
        self.kv.grow(&mut tables, TableEntries::all(entries));
        for index in 0..computed / self.kv.block_tokens() {
            let content = SequenceContent { tokens, block_keys: &keys, extra_keys: None };
            assert_ne!(
                self.kv.publish(&mut tables, 0, index, content),
                PrefixCacheInsertOutcome::Rejected
            );
        }
        tables
    }

    fn run(&mut self, entry: &ScenarioRequest, arrival: u64, config: &SchedulerConfig) {
        let mut request = request(entry, arrival, config);
        let blocks = running_blocks(entry, self.kv.block_tokens());
        let positions = (blocks * self.kv.block_tokens()).min(entry.known_len) as usize;
        request.cold_fields.block_tables =
            self.fill(&request.tokens()[..positions], entry.computed);
        request.block_count = blocks;
        request.computed_tokens = entry.computed;
        request.slot_has_drafts = true;
        request.seq_slot = Some(self.state.take_sequence_slot());
        if entry.non_preemptible {
            request.reserved_blocks = self.kv.blocks_for(request.limit) - blocks;
            self.state.reserved_blocks += request.reserved_blocks;
        }
        let key = request.cold_fields.queue_key;
        let slot = self.state.requests.insert(request);
        self.state.running.insert(key, slot);
    }

    fn name(&self, slot: SlabSlot) -> char {
        char::from(self.state.requests[slot].id.0 as u8)
    }

    fn render(&self, plan: &StepPlan) -> String {
        let mut words = Vec::new();
        if !plan.rows.is_empty() {
            words.push("run".to_owned());
        }
        for row in &plan.rows {
            let drafts = if row.drafts > 0 { format!("+{}", row.drafts) } else { String::new() };
            let (name, end) = (self.name(row.slot), row.start + row.len);
            words.push(format!("{name}[{},{end}){drafts}", row.start));
        }
        if !plan.preempt.is_empty() {
            words.push("preempt".to_owned());
        }
        words.extend(plan.preempt.iter().map(|&slot| self.name(slot).to_string()));
        if !plan.admit.is_empty() {
            words.push("admit".to_owned());
        }
        words.extend(plan.admit.iter().map(|admit| self.name(admit.slot).to_string()));
        if plan.blocked_head.is_some() {
            words.push("blocked".to_owned());
        }
        words.join(" ")
    }
}

#[allow(clippy::needless_pass_by_value, reason = "calls are shorter with a value")]
fn check(text: &str, expected: Expect) {
    let scenario = scenario(text);
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    expected.assert_eq(&scenario.render(&plan));
}

#[test]
fn decodes_come_first_and_in_order() {
    check("| run a 8/9, b 3/4", expect!["run a[8,9) b[3,4)"]);
    check("| run a 4/20, b 3/4 | wait c 0/4", expect!["run b[3,4) a[4,20) c[0,4) admit c"]);
    check("step=1 | run a 8/9, b 3/4", expect!["run a[8,9)"]);
    check("| run a 9/9, b 3/4", expect!["run b[3,4)"]); // `a` waits for its row in flight.
    check("| run a 9/9, b 4/12", expect!["run b[4,12)"]); // The chunk of `b` is planned although `a` waits.
}

#[test]
fn unmasked_rows_are_planned_after_rows_in_flight() {
    // Rows are planned in advance up to the length limit of 17 tokens, or up to the row that samples the
    // first token with a grammar bitmask.
    for (masked_from, expected) in [(None, 8..16), (Some(12), 8..11), (Some(0), 8..9)] {
        let PlanScenario { mut state, mut kv, limits, .. } = scenario("| run a 8/9");
        let slot = state.running.get(0);
        let request = &mut state.requests[slot];
        request.mask_state = GrammarMaskState::new(masked_from);
        request.cold_fields.params.first_masked_position = masked_from.unwrap_or(u32::MAX);
        let mut starts = Vec::new();
        while let plan = plan(&state, &kv, &limits, StepPlan::default())
            && let Some(row) = plan.rows.first()
        {
            assert_eq!((plan.rows.len(), row.len), (1, 1));
            starts.push(row.start);
            commit(&mut state, &mut kv, &plan, 0);
            write_batch_rows(&mut state, &mut kv, &plan.rows, &limits);
        }
        assert_eq!(starts, expected.collect::<Vec<_>>(), "{masked_from:?}");
    }
}

#[test]
fn growth_preempts_the_latest_and_stops_admission() {
    check("free=0 | run a 8/9, b 3/4 | wait c 0/4", expect!["run a[8,9) preempt b"]);
    check("free=1 | run a 8/9, b 3/4 | wait c 0/4", expect!["run a[8,9) b[3,4) blocked"]);
    check("free=0 | run a 8/9, b 8/9, c 3/4", expect!["run a[8,9) preempt c b"]);
    check("free=0 | run a 7/8, b 8/9, c 9/10", expect!["run a[7,8) b[8,9) preempt c"]);
    // No request of lower priority is left, so the request preempts itself.
    check("free=0 | run a 7/8, b 8/9", expect!["run a[7,8) preempt b"]);
    check("free=0 | run a 8/20, b 4/5", expect!["run a[8,20) preempt b"]);
}

#[test]
fn shared_blocks_of_victims_are_counted_as_a_set() {
    // `b` and `c` share their only block: preempting one frees no block, preempting both frees it.
    check("free=0 | run a 8/9, b 4/4, c=b 4/4", expect!["run a[8,9) preempt c b"]);
    check("free=0 | run a 8/9, b 4/4, c 4/4", expect!["run a[8,9) preempt c"]);
}

#[test]
fn non_preemptible_requests_own_their_reserved_blocks() {
    // `b!` holds 1 block and has 2 blocks reserved (length limit 12). `a` cannot use the reserved blocks and
    // preempts itself.
    check("free=2 | run a 8/9, b! 3/4", expect!["preempt a"]);
    check("free=2 | run a 8/9, b! 3/4, c 3/4", expect!["run a[8,9) b[3,4) preempt c"]);
    check("free=3 | run a 3/4, b! 4/5", expect!["run a[3,4) b[4,5)"]);
    // A non-preemptible admission needs blocks for its whole length: 12 tokens, 3 blocks.
    check("free=2 | wait a! 0/4", expect!["blocked"]);
    check("free=3 | wait a! 0/4", expect!["run a[0,4) admit a"]);
}

#[test]
fn chunks_and_sequence_slots_share_one_budget() {
    // Two tokens of the step's budget would be left for `b`. This is less than the chunk quantum, and the
    // step has another prefill chunk, so `b` waits.
    check("step=18 chunk=16 | wait a 0/40, b 0/4", expect!["run a[0,16) admit a"]);
    check("slots=1 | run a 3/4 | wait b 0/4", expect!["run a[3,4)"]);
    check("slots=1 | wait a 0/4, b 0/4", expect!["run a[0,4) admit a"]);
    check("step=64 | wait a 0/200, b 0/4", expect!["run a[0,64) admit a"]);
    // A prefill chunk with an unaligned end is postponed, unless all other rows of the step are decode rows.
    check("step=100 | run a 64/200, b 0/100", expect!["run a[64,128)"]);
    check("step=65 | run x 3/4, a 0/200", expect!["run x[3,4) a[0,64)"]);
    check("step=64 | run x 3/4, a 0/200", expect!["run x[3,4) a[0,63)"]);
}

#[test]
fn admission_stops_at_a_blocked_head() {
    check("free=2 | wait a 0/12, b 0/4", expect!["blocked"]);
    check("free=4 | wait a 0/12, b 0/8, c 0/4", expect!["run a[0,12) admit a"]);
}

#[test]
fn admission_counts_evictable_hits_and_keeps_headroom() {
    // `a` needs three blocks. Two of them are cached and unreferenced. Adding a reference to such a block
    // uses up one available block, as an allocation does.
    check("free=1 | wait a 0/9 | cache a 8", expect!["run a[8,9) admit a"]);
    check("free=0 | wait a 0/9 | cache a 8", expect!["blocked"]);
    // Blocks that another request references cost nothing.
    check("free=1 | run a 8/8 | wait b=a 0/9", expect!["run b[8,9) admit b"]);
    check("free=0 | run a 8/8 | wait b=a 0/9", expect!["blocked"]);
    // An admission leaves 5 % of the pool free (2 of 40 blocks), but at most one block per running request;
    // one request is running, so one block is left free.
    check("free=38 | run a 8/8 | wait b 0/148", expect!["run b[0,64) admit b"]);
    check("free=38 | run a 8/8 | wait b 0/152", expect!["blocked"]);
}

#[test]
fn the_last_token_never_comes_from_the_cache() {
    check("| wait a 0/8 | cache a 8", expect!["run a[4,8) admit a"]);
    check("| wait a 0/9 | cache a 8", expect!["run a[8,9) admit a"]);
    check("block=1 | wait a 0/3 | cache a 3", expect!["run a[2,3) admit a"]);
}

#[test]
fn drafts_are_dropped_before_preemption() {
    check("drafts=4 | run a 7/8", expect!["run a[7,8)+4"]);
    check("drafts=4 step=3 | run a 7/8", expect!["run a[7,8)+2"]);
    check("drafts=4 free=0 | run a 7/8, b 3/4", expect!["run a[7,8) b[3,4)"]);
}

#[test]
fn masked_rows_have_drafts_while_masks_are_in_time() {
    let drafts = |mask_state: GrammarMaskState, first_masked_position| {
        let PlanScenario { mut state, kv, limits, .. } = scenario("drafts=4 | run a 7/8");
        let slot = state.running.get(0);
        let request = &mut state.requests[slot];
        request.mask_state = mask_state;
        request.cold_fields.params.first_masked_position = first_masked_position;
        plan(&state, &kv, &limits, StepPlan::default()).rows[0].drafts
    };
    for mask_state in [GrammarMaskState::Unmasked, GrammarMaskState::InStep] {
        assert_eq!(drafts(mask_state, 0), 4, "{mask_state:?}");
    }
    for mask_state in [
        GrammarMaskState::InStepReady,
        GrammarMaskState::AheadReady,
        GrammarMaskState::LastInFlight,
    ] {
        assert_eq!(drafts(mask_state, 0), 0, "{mask_state:?}");
    }
    // The row samples at position 8; each draft token adds one sample position.
    assert_eq!(
        [8, 9, 11, 99].map(|first| drafts(GrammarMaskState::NotStarted, first)),
        [0, 0, 2, 4]
    );
}

#[test]
fn chunk_alignment_table() {
    let quantum = 64;
    for (start, want, cap, has_prefill, expected) in [
        (0, 10, 64, false, 10),   // whole prompt
        (0, 64, 64, true, 64),    // the whole prompt fits exactly
        (0, 200, 100, false, 64), // aligned end
        (64, 200, 100, true, 64), // aligned start and end
        (16, 200, 100, true, 48), // unaligned start, aligned end
        (0, 200, 63, true, 0),    // below the quantum in a step with other prefill: postponed
        (0, 200, 63, false, 63),  // decode rows must not starve prefill
        (60, 200, 3, false, 3),   // decode rows must not starve prefill
        (63, 200, 1, true, 1),    // reaches the next multiple of 64
        (0, 200, 0, false, 0),    // no budget is left
        (128, 1, 1, true, 1),
    ] {
        let len = align_chunk(start, want, cap, quantum, has_prefill);
        assert_eq!(
            len, expected,
            "start {start} uncomputed {want} cap {cap} has_prefill {has_prefill}"
        );
    }
}

#[test]
fn blocked_head_is_not_looked_up_again_without_change() {
    // Five blocks were registered in the prefix cache before the queue head `a` was blocked; `x` grows by one
    // of the three free blocks.
    let mut scenario = scenario("free=3 | run x 20/21 | wait a 0/20");
    let first = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    commit(&mut scenario.state, &mut scenario.kv, &first, 0);
    assert_eq!(
        scenario.state.blocked_head.map(|b| (b.needed_blocks, b.evictable_hits)),
        Some((5, 0))
    );
    let again = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    assert!(again.blocked_head.is_none(), "two free blocks are fewer than the five needed");
    // Two more blocks are registered in the prefix cache. `a` may hit these blocks while other requests
    // reference them; it then needs only three free blocks, but none is free.
    let mut tables: Vec<BlockTables> = Vec::new();
    for token_source in [b'p', b'q'] {
        tables.push(scenario.fill(&tokens(token_source, 4), 4));
    }
    let again = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    assert!(again.blocked_head.is_none(), "no free block, two published: three are missing");
}

#[test]
fn decode_only_plan_has_no_chunk() {
    let has_chunk = |text| {
        let scenario = scenario(text);
        plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default()).has_chunk()
    };
    assert!(!has_chunk("drafts=2 | run a 8/9, b 3/4"));
    assert!(has_chunk("| run a 8/9, b 2/4"));
}

#[test]
fn draft_rows_end_at_the_last_row_with_drafts() {
    let draft_rows = |drafts: &[u8]| {
        let row = |&drafts: &u8| PlannedRow {
            slot: SlabSlot(0),
            start: 0,
            len: 1,
            drafts,
            new_blocks: 0,
        };
        StepPlan { rows: drafts.iter().map(row).collect(), ..StepPlan::default() }.draft_rows()
    };
    assert_eq!([&[][..], &[0, 0], &[0, 2, 0], &[1, 0, 3]].map(draft_rows), [0, 0, 2, 3]);
}

#[test]
fn pending_prefill_counts_tokens_beyond_the_step() {
    let scenario = scenario("step=16 | run a 8/9, b 4/12 | wait c 0/40 | cache c 8");
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    assert_eq!(scenario.render(&plan), "run a[8,9) b[4,12) c[8,12) admit c");
    assert_eq!(plan.pending_prefill_tokens, 8 + 32);
}

#[test]
fn continued_prefill_is_partial() {
    let has_partial = |text| {
        let scenario = scenario(text);
        plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default())
            .has_partial_prefill()
    };
    assert!(!has_partial("| run a 8/9 | wait b 0/4"));
    assert!(has_partial("| run a 8/9, b 2/4"));
}

#[test]
fn non_preemptible_admission_reserves_its_growth() {
    let scenario = scenario("free=9 | wait a! 0/4");
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    assert_eq!(
        plan.admit.iter().map(|admission| admission.reserved_blocks).collect::<Vec<_>>(),
        [2]
    );
}

#[test]
fn max_preemptions_make_a_request_non_preemptible() {
    for before in 0..PREEMPTIONS_MAX {
        let PlanScenario { mut state, mut kv, limits, .. } = scenario("free=0 | run a 8/9, b 3/4");
        let last = state.running.get(1);
        state.requests[last].preemptions = before;
        let plan = plan(&state, &kv, &limits, StepPlan::default());
        assert_eq!(plan.preempt, [last]);
        commit(&mut state, &mut kv, &plan, 0);
        let request = &state.requests[last];
        assert_eq!(request.preemptions, before + 1);
        assert_eq!(request.non_preemptible, before + 1 == PREEMPTIONS_MAX, "{before} before");
    }
}

#[test]
fn first_admission_counts_prefix_hits() {
    let PlanScenario { mut state, mut kv, limits, .. } =
        scenario("| wait a 0/9, b 0/5 | cache a 8");
    let plan = plan(&state, &kv, &limits, StepPlan::default());
    commit(&mut state, &mut kv, &plan, 0);
    let totals = &state.totals;
    assert_eq!((totals.prompt_tokens, totals.prompt_tokens_cached), (14, 8));
    assert_eq!((totals.prefix_queries, totals.prefix_hits), (14, 8));
}

/// Adds a running request with `computed` computed tokens to a scenario with a window group; its block tables have
/// entries for all known tokens and, in the window group, for the computed tokens.
fn run_windowed(scenario: &mut PlanScenario, entry: &str, config: &SchedulerConfig) {
    let entry = parse_request(entry);
    let mut request = request(&entry, u64::from(entry.name), config);
    let kv = &mut scenario.kv;
    let entries = TableEntries {
        kept: kv.blocks_for(entry.known_len),
        windowed: kv.blocks_for(entry.computed),
    };
    request.grow_tables(entries, kv);
    request.computed_tokens = entry.computed;
    request.seq_slot = Some(scenario.state.take_sequence_slot());
    if entry.non_preemptible {
        let in_flight = config.limits.request_tokens_in_flight();
        let total = config.kv.spec.blocks_of_request(request.limit, in_flight);
        request.reserved_blocks = total - kv.blocks_to_grow(TableEntries::default(), entries);
        scenario.state.reserved_blocks += request.reserved_blocks;
    }
    let key = request.cold_fields.queue_key;
    let slot = scenario.state.requests.insert(request);
    scenario.state.running.insert(key, slot);
}

/// Plans a step of running requests in a pool of `blocks` blocks of four tokens, with a group that keeps all positions
/// and a group with a window of 16 tokens. Chunks have at most four tokens.
fn plan_windowed(blocks: u32, running: &[&str]) -> String {
    let mut scenario = scenario("step=8 chunk=4 free=1 |");
    let group = |kind| KvGroup { layers: vec![0], kind, bytes_per_block: 1 };
    let groups = vec![group(KvKind::Full), group(KvKind::Window { tokens: 16 })];
    let kv = KvConfig::new(KvSpec { block_tokens: 4, groups }, blocks, [1, 2]);
    scenario.kv = KvCache::new(&kv).unwrap();
    let config = SchedulerConfig::new(scenario.limits.clone(), kv);
    for entry in running {
        run_windowed(&mut scenario, entry, &config);
    }
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, StepPlan::default());
    scenario.render(&plan)
}

#[test]
fn chunks_allocate_their_window_blocks() {
    // `a` holds 7 + 2 blocks and needs another one for its chunk.
    assert_eq!(plan_windowed(10, &["a 8/28"]), "run a[8,12)");
    // `b` holds 4 + 1 blocks. It is preempted for the chunk of `a`, although its own chunk would need a block too.
    assert_eq!(plan_windowed(15, &["a 8/28", "b 4/16"]), "run a[8,12)");
    assert_eq!(plan_windowed(14, &["a 8/28", "b 4/16"]), "run a[8,12) preempt b");
}

#[test]
fn chunks_with_reserve_are_planned_after_one_without_blocks() {
    // `b` holds 4 + 1 blocks and reserves 7 for up to 24 tokens, so that `a` lacks a block.
    assert_eq!(plan_windowed(21, &["a 8/28", "b! 4/16"]), "run b[4,8)");
    assert_eq!(plan_windowed(22, &["a 8/28", "b! 4/16"]), "run a[8,12) b[4,8)");
}
