//! Tests of `plan`. A scenario is one line `settings | run .. | wait .. | cache ..`, each section optional.
//!
//! `a 8/9` is request `a` with 8 of 9 tokens computed; `b=a 0/9` has the same tokens as `a`; `a! ..` is
//! non-preemptible, with blocks up to its length limit (8 more tokens) reserved. Running requests hold the
//! blocks that were allocated at their admission, and their computed full blocks are registered in the prefix
//! cache. `cache a 8` leaves the first 8 tokens of `a` cached and unreferenced. `free` is the number of
//! additional free blocks.

mod scenario;
mod windows;

use super::*;
use crate::commit::{commit, write_batch_rows};
use crate::mask_state::GrammarMaskState;
use crate::request::PREEMPTIONS_MAX;
use crate::request_queue::QueueKey;
use crate::{RequestSubmission, SchedulerConfig};
use expect_test::{Expect, expect};
use kvcache::{BlockTables, KvConfig, PrefixCacheInsertOutcome, SequenceContent};
use protocol::{KvGroup, KvKind, KvSpec, Replica, Token};
use scenario::{PlanScenario, parse_request, request, scenario, tokens};

#[allow(clippy::needless_pass_by_value, reason = "calls are shorter with a value")]
fn check(text: &str, expected: Expect) {
    let scenario = scenario(text);
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
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
        while let plan = plan(&state, &kv, &limits, None, StepPlan::default())
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
        plan(&state, &kv, &limits, None, StepPlan::default()).rows[0].drafts
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
    let first = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
    commit(&mut scenario.state, &mut scenario.kv, &first, 0);
    assert_eq!(
        scenario.state.blocked_head.map(|b| (b.needed_blocks, b.evictable_hits)),
        Some((5, 0))
    );
    let again = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
    assert!(again.blocked_head.is_none(), "two free blocks are fewer than the five needed");
    // Two more blocks are registered in the prefix cache. `a` may hit these blocks while other requests
    // reference them; it then needs only three free blocks, but none is free.
    let mut tables: Vec<BlockTables> = Vec::new();
    for token_source in [b'p', b'q'] {
        tables.push(scenario.fill(&tokens(token_source, 4), 4));
    }
    let again = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
    assert!(again.blocked_head.is_none(), "no free block, two published: three are missing");
}

#[test]
fn decode_only_plan_has_no_chunk() {
    let has_chunk = |text| {
        let scenario = scenario(text);
        plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default()).has_chunk()
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
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
    assert_eq!(scenario.render(&plan), "run a[8,9) b[4,12) c[8,12) admit c");
    assert_eq!(plan.pending_prefill_tokens, 8 + 32);
}

#[test]
fn continued_prefill_is_partial() {
    let has_partial = |text| {
        let scenario = scenario(text);
        plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default())
            .has_partial_prefill()
    };
    assert!(!has_partial("| run a 8/9 | wait b 0/4"));
    assert!(has_partial("| run a 8/9, b 2/4"));
}

#[test]
fn non_preemptible_admission_reserves_its_growth() {
    let scenario = scenario("free=9 | wait a! 0/4");
    let plan = plan(&scenario.state, &scenario.kv, &scenario.limits, None, StepPlan::default());
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
        let plan = plan(&state, &kv, &limits, None, StepPlan::default());
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
    let plan = plan(&state, &kv, &limits, None, StepPlan::default());
    commit(&mut state, &mut kv, &plan, 0);
    let totals = &state.totals;
    assert_eq!((totals.prompt_tokens, totals.prompt_tokens_cached), (14, 8));
    assert_eq!((totals.prefix_queries, totals.prefix_hits), (14, 8));
    assert_eq!(state.kv_group_hits.to_vec(), [], "one group that keeps all positions");
}

#[test]
fn time_budget_shortens_chunks_while_requests_decode() {
    // A quantum of 64 tokens; 10 µs per token, 1 µs per pair with a context position, 100 µs per step.
    let costs = StepCosts { fixed_ns: 100_000.0, token_ns: 10_000.0, pair_ns: 1_000.0 };
    let chunks = |text: &str, max_step_ms: Option<u32>| {
        let PlanScenario { state, kv, mut limits, .. } = scenario(text);
        limits.tokens_per_step = 1_000;
        limits.max_step_ms = max_step_ms;
        let plan = plan(&state, &kv, &limits, Some(costs), StepPlan::default());
        let chunks = plan.rows[plan.decode_rows..].iter();
        chunks.map(|row| (row.start, row.len)).collect::<Vec<_>>()
    };
    let decoding = "free=600 | run a 8/9 | wait b 0/900, c 0/900";
    assert_eq!(chunks(decoding, None), [(0, 900), (0, 64)], "limited by the tokens of the step");
    // 5.9 ms - 10 µs are left: 71 tokens (71 · (10 + 71) µs), aligned to the quantum.
    assert_eq!(chunks(decoding, Some(6)), [(0, 64)]);
    assert_eq!(chunks(decoding, Some(1)), [(0, 64)], "at least one quantum, but only one");
    assert_eq!(chunks(decoding, Some(1_000)), [(0, 900), (0, 64)]);
    let alone = "free=600 | wait b 0/900";
    assert_eq!(chunks(alone, Some(6)), [(0, 900)], "no request waits for a token");
    // The context of a chunk counts: 8 + 512 positions at first.
    let continued = "free=600 | run a 8/9, b 512/900";
    assert_eq!(chunks(continued, Some(40)), [(512, 64)], "64 tokens take 38 ms");
    assert_eq!(chunks(continued, Some(90)), [(512, 128)], "128 tokens take 83 ms");
}
