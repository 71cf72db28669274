//! Tests of the prefill gate and of the dispatch mode of a lockstep group.

use super::*;
use crate::SchedulerConfig;
use crate::plan::PlannedRow;
use crate::slab::SlabSlot;
use kvcache::{BlockTables, KvConfig, TableEntries};
use protocol::{KvGroup, KvKind, KvSpec, Replica};

const DELAYED_INPUT: PrefillGateInput = PrefillGateInput {
    ranks: 4,
    ranks_with_prefill: 2,
    pending_prefill_tokens: 100,
    tokens_per_step: 100,
    decode_rows: 8,
    kv_usage: 0.5,
    has_partial_prefill: false,
};

/// Returns whether a `PrefillGate` that has delayed prefill for `delayed` steps allows prefill for
/// `input`.
fn gate_opens(delayed: u32, input: PrefillGateInput) -> bool {
    PrefillGate { started: true, delayed_steps: delayed, ..PrefillGate::default() }
        .allows_prefill(&input)
}

#[test]
fn prefill_gate_decision_table() {
    assert!(PrefillGate::default().allows_prefill(&DELAYED_INPUT), "first step");
    let plenty = PrefillGateInput { pending_prefill_tokens: 400, ..DELAYED_INPUT };
    assert!(!gate_opens(0, plenty), "two ranks have no prefill, the others fill a step");
    assert!(
        gate_opens(0, PrefillGateInput { ranks_with_prefill: 0, ..DELAYED_INPUT }),
        "no prefill"
    );
    assert!(gate_opens(0, PrefillGateInput { decode_rows: 0, ..DELAYED_INPUT }), "no decode rows");
    assert!(
        gate_opens(0, PrefillGateInput { kv_usage: 0.9, ..DELAYED_INPUT }),
        "KV usage is at the limit"
    );
    assert!(
        !gate_opens(199, DELAYED_INPUT) && gate_opens(200, DELAYED_INPUT),
        "delayed for the maximum number of steps"
    );
}

#[test]
fn prefill_gate_counts_partial_prefills_and_full_steps() {
    let partial = PrefillGateInput { has_partial_prefill: true, ..DELAYED_INPUT };
    assert!(
        !gate_opens(99, partial) && gate_opens(100, partial),
        "partially prefilled prompts have a lower maximum"
    );
    let all = PrefillGateInput { ranks_with_prefill: 4, ..DELAYED_INPUT };
    assert!(!gate_opens(0, all), "all ranks have prefill, below the token budget");
    assert!(
        gate_opens(0, PrefillGateInput { pending_prefill_tokens: 360, ..all }),
        "all ranks have prefill, 90 % of the token budget"
    );
}

#[test]
fn prefill_gate_opens_when_pending_tokens_stop_growing() {
    let all = PrefillGateInput { ranks_with_prefill: 4, ..DELAYED_INPUT };
    let mut gate = PrefillGate { started: true, ..PrefillGate::default() };
    let delayed = (0..100).take_while(|_| !gate.allows_prefill(&all)).count();
    assert_eq!(delayed, 10, "one step with growth, nine without; the tenth opens the gate");
    assert_eq!(
        gate,
        PrefillGate { started: true, ..PrefillGate::default() },
        "opening resets the gate"
    );
}

/// Builds two replicas; `decode_rows[i]` and `rows[i]` are the numbers of decode rows and of all rows in
/// the plan of replica `i`.
fn replicas(decode_rows: [usize; 2], rows: [usize; 2]) -> Vec<ReplicaState> {
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: 4, groups: vec![group] };
    let config = SchedulerConfig::new(SchedulerLimits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
    let row =
        |slot| PlannedRow { slot: SlabSlot(slot), start: 0, len: 1, drafts: 0, new_blocks: 0 };
    let replica = |index: usize| {
        let mut replica = ReplicaState::new(Replica(index as u16), &config).unwrap();
        replica.plan.decode_rows = decode_rows[index];
        replica.plan.rows = (0..rows[index] as u32).map(row).collect();
        replica
    };
    (0..2).map(replica).collect()
}

#[test]
fn gate_input_sums_pending_tokens_and_kv_usage() {
    let limits = SchedulerLimits::cpu(8, 100);
    let mut replicas = replicas([1, 1], [2, 1]);
    for (replica, (pending, in_use)) in replicas.iter_mut().zip([(1_000, 6), (100, 2)]) {
        replica.plan.pending_prefill_tokens = pending;
        replica.kv.grow(&mut BlockTables::default(), TableEntries::all(in_use));
    }
    let input = gate_input(&replicas, &limits);
    assert_eq!(
        input.pending_prefill_tokens,
        u64::from(limits.tokens_per_step) + 100,
        "at most one step per rank"
    );
    assert_eq!(input.kv_usage, 0.75, "6 of 8 blocks");
    assert!(input.has_partial_prefill, "the first rank continues a prefill");
    replicas[0].plan.decode_rows = 2;
    assert!(!gate_input(&replicas, &limits).has_partial_prefill);
}

#[test]
fn closed_prefill_gate_keeps_decode_rows() {
    let rows_left = |gate: PrefillGate, decode_rows, rows| {
        let (mut gate, mut replicas) = (gate, replicas(decode_rows, rows));
        delay_prefill(&mut gate, &mut replicas, &SchedulerLimits::cpu(8, 100));
        (
            replicas.iter().map(|replica| replica.plan.rows.len()).collect::<Vec<_>>(),
            gate.delayed_steps,
        )
    };
    let input = gate_input(&replicas([1, 1], [2, 1]), &SchedulerLimits::cpu(8, 100));
    assert_eq!((input.ranks, input.ranks_with_prefill, input.decode_rows), (2, 1, 2));
    assert_eq!(input.tokens_per_step, SchedulerLimits::cpu(8, 100).tokens_per_step);
    let both = gate_input(&replicas([1, 0], [2, 1]), &SchedulerLimits::cpu(8, 100));
    assert_eq!((both.ranks_with_prefill, both.decode_rows), (2, 1));
    let started = PrefillGate { started: true, ..PrefillGate::default() };
    assert_eq!(rows_left(started, [1, 1], [2, 1]), (vec![1, 1], 1), "delayed");
    assert_eq!(rows_left(PrefillGate::default(), [1, 1], [2, 1]), (vec![2, 1], 0), "opens");
    assert_eq!(rows_left(started, [0, 0], [0, 0]), (vec![0, 0], 0), "no rank has rows");
}

#[test]
fn dispatch_mode_fits_the_largest_rank() {
    let of = |maxima, has_chunk, width| {
        let headers = headers_for(maxima, has_chunk, &[1, 2, 4, 8], width);
        (headers.dispatch, headers.moe_tokens, headers.draft_rows)
    };
    let graph = |rows, width| StepLaunchMode::Graph { rows, width };
    assert_eq!(of([3, 3, 0], false, 1), (graph(4, 1), 4, 0));
    assert_eq!(of([3, 40, 0], true, 1), (StepLaunchMode::Eager { tokens: 40 }, 40, 0));
    assert_eq!(of([9, 9, 0], false, 1), (StepLaunchMode::Eager { tokens: 9 }, 9, 0));
    assert_eq!(
        of([3, 5, 2], false, 3),
        (graph(4, 3), 12, 4),
        "a captured graph drafts for all rows"
    );
    assert_eq!(of([3, 3, 0], false, 3), (graph(4, 3), 12, 4));
    assert_eq!(of([3, 45, 2], true, 3), (StepLaunchMode::Eager { tokens: 45 }, 45, 2));
}
