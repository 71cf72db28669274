//! Lockstep of replicas that share collectives: all ranks of the group run each step together, with equal
//! batch headers (dispatch mode and padded sizes).
//!
//! No batch is sent if no rank has rows. If any rank has rows, every rank gets a batch, which may be empty.
//! The scheduler decides this without a collective, a clock or a coordinator.

use crate::SchedulerLimits;
use crate::plan::StepPlan;
use crate::replica_state::ReplicaState;
use protocol::StepLaunchMode;

/// Prefill is not delayed if the KV usage (share of KV blocks in use) of any rank is at least this value. A
/// delay would be useless: requests cannot be admitted for lack of free blocks, so no further prefill work
/// would be collected.
const KV_USAGE_FULL: f64 = 0.9;
/// Share of the group's token budget that the pending prefill tokens must fill before prefill is no longer
/// delayed. Other conditions end the delay earlier.
const BUDGET_FILL_MIN: f64 = 0.9;
/// Number of steps of the lockstep group without growth of pending prefill tokens after which prefill is no
/// longer delayed.
const STALLED_STEPS: u32 = 10;
/// Maximum number of steps of the lockstep group for which prefill is delayed if any prompt is partially
/// prefilled.
const DELAYED_STEPS_MAX_PARTIAL: u32 = 100;
/// Maximum number of steps of the lockstep group for which prefill is delayed.
const DELAYED_STEPS_MAX: u32 = 200;

/// Decides in which steps a lockstep group prefills. A prefill chunk on one rank makes every rank run without
/// a captured graph, so prefill chunks of several ranks should share a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PrefillGate {
    started: bool,
    /// Number of consecutive steps of the lockstep group in which prefill was delayed.
    delayed_steps: u32,
    /// Maximum number of pending prefill tokens in the steps since prefill was last allowed.
    pending_prefill_tokens: u64,
    /// Number of steps of the lockstep group since the maximum `pending_prefill_tokens` last grew.
    stalled_steps: u32,
}

/// Input of the prefill gate in one step of the lockstep group.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PrefillGateInput {
    /// Number of ranks in the group.
    pub(crate) ranks: u32,
    /// Number of ranks with prefill rows in their plan; waiting requests that cannot be admitted are not
    /// counted.
    pub(crate) ranks_with_prefill: u32,
    /// Number of uncomputed prefill tokens of the requests in the plans, summed over ranks; each rank counts
    /// at most `tokens_per_step` tokens.
    pub(crate) pending_prefill_tokens: u64,
    /// Token budget of one rank's step.
    pub(crate) tokens_per_step: u32,
    /// Decode rows, summed over all ranks.
    pub(crate) decode_rows: usize,
    /// KV usage (share of KV blocks in use) of the rank with the highest KV usage.
    pub(crate) kv_usage: f64,
    /// Whether any prompt is partially prefilled.
    pub(crate) has_partial_prefill: bool,
}

impl PrefillGate {
    /// Returns whether the next step of the lockstep group may contain prefill rows. If not, it contains
    /// decode rows only.
    pub(crate) fn allows_prefill(&mut self, input: &PrefillGateInput) -> bool {
        let grown = input.pending_prefill_tokens > self.pending_prefill_tokens;
        self.stalled_steps = if grown { 0 } else { self.stalled_steps + 1 };
        self.pending_prefill_tokens = self.pending_prefill_tokens.max(input.pending_prefill_tokens);
        let opens = self.should_open(input);
        if opens {
            *self = Self { started: true, ..Self::default() };
        } else {
            self.delayed_steps += 1;
        }
        opens
    }

    fn should_open(&self, input: &PrefillGateInput) -> bool {
        let is_unconditional = !self.started
            || input.ranks_with_prefill == 0
            || input.decode_rows == 0
            || input.kv_usage >= KV_USAGE_FULL
            || self.delayed_steps >= DELAYED_STEPS_MAX
            || (input.has_partial_prefill && self.delayed_steps >= DELAYED_STEPS_MAX_PARTIAL);
        if is_unconditional {
            return true;
        }
        if input.ranks_with_prefill < input.ranks {
            return false;
        }
        let budget = u64::from(input.ranks_with_prefill) * u64::from(input.tokens_per_step);
        input.pending_prefill_tokens as f64 >= BUDGET_FILL_MIN * budget as f64
            || self.stalled_steps >= STALLED_STEPS
    }
}

/// Removes the prefill rows from the plans of all ranks if `gate` does not allow prefill in this step.
pub(crate) fn delay_prefill(
    gate: &mut PrefillGate,
    replicas: &mut [ReplicaState],
    limits: &SchedulerLimits,
) {
    if replicas.iter().all(|replica| replica.plan.rows.is_empty()) {
        return;
    }
    let input = gate_input(replicas, limits);
    if !gate.allows_prefill(&input) {
        for replica in replicas {
            replica.plan.delay_prefill();
        }
    }
}

fn gate_input(replicas: &[ReplicaState], limits: &SchedulerLimits) -> PrefillGateInput {
    let mut input = PrefillGateInput {
        ranks: replicas.len() as u32,
        tokens_per_step: limits.tokens_per_step,
        ..PrefillGateInput::default()
    };
    for ReplicaState { plan, kv, .. } in replicas {
        let counts = kv.counts();
        let usage = f64::from(counts.in_use) / f64::from(counts.pool);
        input.ranks_with_prefill += u32::from(plan.rows.len() > plan.decode_rows);
        input.pending_prefill_tokens +=
            plan.pending_prefill_tokens.min(u64::from(limits.tokens_per_step));
        input.decode_rows += plan.decode_rows;
        input.kv_usage = input.kv_usage.max(usage);
        input.has_partial_prefill |= plan.has_partial_prefill();
    }
    input
}

/// Fields of `Batch` that are equal on all ranks in one step of a lockstep group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LockstepBatchFields {
    pub(crate) dispatch: StepLaunchMode,
    /// Number of tokens to which every rank pads its MoE layers.
    pub(crate) moe_tokens: u32,
    /// Number of rows to which every rank pads the forward passes of the draft model.
    pub(crate) draft_rows: u32,
}

/// Computes the batch headers (dispatch mode and padded sizes) for the plans of a group. If all rows decode,
/// the smallest captured graph that fits the rank with the most rows is replayed. If any rank has a prefill
/// chunk, or no graph fits, all ranks run eagerly.
pub(crate) fn batch_headers(
    replicas: &[ReplicaState],
    limits: &SchedulerLimits,
) -> LockstepBatchFields {
    let plans = || replicas.iter().map(|replica| &replica.plan);
    let maximum = |of: fn(&StepPlan) -> u32| plans().map(of).max().unwrap_or(0);
    let has_chunk = plans().any(StepPlan::has_chunk);
    // Ranks of a group capture the same graphs.
    let capture_sizes = replicas.first().map_or(&[][..], |replica| &replica.capture_sizes);
    let maxima = [|plan: &StepPlan| plan.rows.len() as u32, StepPlan::tokens, StepPlan::draft_rows]
        .map(maximum);
    headers_for(maxima, has_chunk, capture_sizes, 1 + u32::from(limits.draft_tokens))
}

/// Computes the batch headers (dispatch mode and padded sizes) from the maxima over all ranks: rows, tokens,
/// and rows up to the last row with draft tokens. `width` is the number of tokens per row in a captured
/// graph.
fn headers_for(
    [rows, tokens, draft_rows]: [u32; 3],
    has_chunk: bool,
    capture_sizes: &[u32],
    width: u32,
) -> LockstepBatchFields {
    match capture_sizes.iter().copied().find(|&graph| graph >= rows && !has_chunk) {
        Some(rows) => LockstepBatchFields {
            dispatch: StepLaunchMode::Graph { rows, width },
            moe_tokens: rows * width,
            // A captured graph runs the draft model on all rows of the graph.
            draft_rows: if width > 1 { rows } else { 0 },
        },
        None => LockstepBatchFields {
            dispatch: StepLaunchMode::Eager { tokens },
            moe_tokens: tokens,
            draft_rows,
        },
    }
}

#[cfg(test)]
mod tests {
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
        assert!(
            gate_opens(0, PrefillGateInput { decode_rows: 0, ..DELAYED_INPUT }),
            "no decode rows"
        );
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
        let config =
            SchedulerConfig::new(SchedulerLimits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
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
}
