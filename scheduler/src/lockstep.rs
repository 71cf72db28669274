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
mod tests;
