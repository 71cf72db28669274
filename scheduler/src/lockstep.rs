//! Steps of replicas that share collectives: the group steps together, and all ranks get equal batch headers.
//!
//! Nothing is sent if no rank has rows. If any rank has rows, every rank gets a batch, which may be empty. No
//! collective, clock or coordinator is involved.

use crate::SchedulerLimits;
use crate::plan::StepPlan;
use crate::replica_state::ReplicaState;
use protocol::DispatchMode;

/// KV usage from which prefill is never delayed: only finished requests free blocks.
const KV_USAGE_FULL: f64 = 0.9;
/// Minimum fill of the group's token budget for which a prefill step is run.
const BUDGET_FILL_MIN: f64 = 0.9;
/// Number of group steps without growth of pending prefill tokens after which prefill is no longer delayed.
const STALLED_STEPS: u32 = 10;
/// Maximum number of group steps for which a partially prefilled prompt (first) or any prompt (second) is
/// delayed.
const HOLD_STEPS_MAX_PARTIAL: u32 = 100;
const HOLD_STEPS_MAX: u32 = 200;

/// Decides when a lockstep group prefills. A chunk on one rank makes every rank run eagerly, so chunks of
/// several ranks should share a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PrefillGate {
    started: bool,
    /// Number of consecutive group steps in which prefill was delayed.
    held_steps: u32,
    /// Maximum of the pending prefill tokens, and group steps since it last grew.
    pending_prefill_tokens: u64,
    stalled_steps: u32,
}

/// Input of the prefill gate in one group step.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PrefillGateInput {
    /// Number of ranks in the group.
    pub(crate) ranks: u32,
    /// Number of ranks with prefill rows in their plan; requests that cannot be admitted do not count.
    pub(crate) ranks_with_prefill: u32,
    /// Uncomputed prefill tokens of requests in the plans, capped at one step's budget per rank.
    pub(crate) pending_prefill_tokens: u64,
    /// Token budget of one rank's step.
    pub(crate) tokens_per_step: u32,
    /// Decode rows, summed over all ranks.
    pub(crate) decode_rows: usize,
    /// Highest share of KV blocks in use on any rank.
    pub(crate) kv_usage: f64,
    /// Whether any prompt is partially prefilled.
    pub(crate) has_partial_prefill: bool,
}

impl PrefillGate {
    /// Returns whether the step runs all passes (`true`) or decode rows only.
    pub(crate) fn allows_prefill(&mut self, view: &PrefillGateInput) -> bool {
        let grown = view.pending_prefill_tokens > self.pending_prefill_tokens;
        self.stalled_steps = if grown { 0 } else { self.stalled_steps + 1 };
        self.pending_prefill_tokens = self.pending_prefill_tokens.max(view.pending_prefill_tokens);
        let fires = self.should_open(view);
        if fires {
            *self = Self { started: true, ..Self::default() };
        } else {
            self.held_steps += 1;
        }
        fires
    }

    fn should_open(&self, view: &PrefillGateInput) -> bool {
        let must = !self.started
            || view.ranks_with_prefill == 0
            || view.decode_rows == 0
            || view.kv_usage >= KV_USAGE_FULL
            || self.held_steps >= HOLD_STEPS_MAX
            || (view.has_partial_prefill && self.held_steps >= HOLD_STEPS_MAX_PARTIAL);
        if must {
            return true;
        }
        if view.ranks_with_prefill < view.ranks {
            return false;
        }
        let budget = u64::from(view.ranks_with_prefill) * u64::from(view.tokens_per_step);
        view.pending_prefill_tokens as f64 >= BUDGET_FILL_MIN * budget as f64
            || self.stalled_steps >= STALLED_STEPS
    }
}

/// Removes prefill rows from every plan if the gate is closed.
pub(crate) fn hold_prefill(
    gate: &mut PrefillGate,
    domains: &mut [ReplicaState],
    limits: &SchedulerLimits,
) {
    if domains.iter().all(|domain| domain.plan.rows.is_empty()) {
        return;
    }
    let view = gate_input(domains, limits);
    if !gate.allows_prefill(&view) {
        for domain in domains {
            domain.plan.hold_prefill();
        }
    }
}

fn gate_input(domains: &[ReplicaState], limits: &SchedulerLimits) -> PrefillGateInput {
    let mut view = PrefillGateInput {
        ranks: domains.len() as u32,
        tokens_per_step: limits.tokens_per_step,
        ..PrefillGateInput::default()
    };
    for ReplicaState { plan, kv, .. } in domains {
        let counts = kv.counts();
        let usage = f64::from(counts.in_use) / f64::from(counts.pool);
        view.ranks_with_prefill += u32::from(plan.rows.len() > plan.decode_rows);
        view.pending_prefill_tokens +=
            plan.pending_prefill_tokens.min(u64::from(limits.tokens_per_step));
        view.decode_rows += plan.decode_rows;
        view.kv_usage = view.kv_usage.max(usage);
        view.has_partial_prefill |= plan.has_partial_prefill();
    }
    view
}

/// Header fields that are equal in all batches of one group step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchHeaders {
    pub(crate) dispatch: DispatchMode,
    /// Number of tokens to which MoE layers are padded.
    pub(crate) moe_tokens: u32,
    /// Number of rows to which passes of the draft model are padded.
    pub(crate) draft_rows: u32,
}

/// Computes the headers for the plans of a group. If all rows decode, the smallest captured graph that fits
/// the largest rank is replayed. If any rank has a chunk, or no graph fits, all ranks run eagerly.
pub(crate) fn batch_headers(domains: &[ReplicaState], limits: &SchedulerLimits) -> BatchHeaders {
    let plans = || domains.iter().map(|domain| &domain.plan);
    let most = |of: fn(&StepPlan) -> u32| plans().map(of).max().unwrap_or(0);
    let has_chunk = plans().any(StepPlan::has_chunk);
    // Ranks of a group capture the same graphs.
    let graph_rows = domains.first().map_or(&[][..], |domain| &domain.capture_sizes);
    let of = [|plan: &StepPlan| plan.rows.len() as u32, StepPlan::tokens, StepPlan::draft_rows]
        .map(most);
    headers_for(of, has_chunk, graph_rows, 1 + u32::from(limits.draft_tokens))
}

/// Computes the headers from the maxima over all ranks: rows, tokens, and rows up to the last row with draft
/// tokens.
fn headers_for(
    [rows, tokens, draft_rows]: [u32; 3],
    chunk: bool,
    graphs: &[u32],
    width: u32,
) -> BatchHeaders {
    match graphs.iter().copied().find(|&graph| graph >= rows && !chunk) {
        Some(rows) => BatchHeaders {
            dispatch: DispatchMode::Graph { rows, width },
            moe_tokens: rows * width,
            // A captured graph runs the draft model on all of its rows.
            draft_rows: if width > 1 { rows } else { 0 },
        },
        None => BatchHeaders {
            dispatch: DispatchMode::Eager { tokens },
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
    use kvcache::{BlockTable, KvConfig};
    use protocol::{KvGroup, KvKind, KvSpec, Replica};

    const HELD_INPUT: PrefillGateInput = PrefillGateInput {
        ranks: 4,
        ranks_with_prefill: 2,
        pending_prefill_tokens: 100,
        tokens_per_step: 100,
        decode_rows: 8,
        kv_usage: 0.5,
        has_partial_prefill: false,
    };

    /// Returns whether a started gate that was held for `held` steps opens on `view`.
    fn gate_opens(held: u32, view: PrefillGateInput) -> bool {
        PrefillGate { started: true, held_steps: held, ..PrefillGate::default() }
            .allows_prefill(&view)
    }

    #[test]
    fn prefill_gate_decision_table() {
        assert!(PrefillGate::default().allows_prefill(&HELD_INPUT), "first step");
        let plenty = PrefillGateInput { pending_prefill_tokens: 400, ..HELD_INPUT };
        assert!(
            !gate_opens(0, plenty),
            "some ranks have no prefill, the others more than a step of it"
        );
        assert!(
            gate_opens(0, PrefillGateInput { ranks_with_prefill: 0, ..HELD_INPUT }),
            "nothing to hold"
        );
        assert!(
            gate_opens(0, PrefillGateInput { decode_rows: 0, ..HELD_INPUT }),
            "nothing else to run"
        );
        assert!(gate_opens(0, PrefillGateInput { kv_usage: 0.9, ..HELD_INPUT }), "blocks run out");
        assert!(!gate_opens(199, HELD_INPUT) && gate_opens(200, HELD_INPUT), "held long enough");
        let partial = PrefillGateInput { has_partial_prefill: true, ..HELD_INPUT };
        assert!(
            !gate_opens(99, partial) && gate_opens(100, partial),
            "a started prompt waits less"
        );
        let all = PrefillGateInput { ranks_with_prefill: 4, ..HELD_INPUT };
        assert!(!gate_opens(0, all), "all ranks, little work");
        assert!(
            gate_opens(0, PrefillGateInput { pending_prefill_tokens: 360, ..all }),
            "all ranks, nine tenths full"
        );
    }

    #[test]
    fn prefill_gate_opens_when_pending_tokens_stop_growing() {
        let all = PrefillGateInput { ranks_with_prefill: 4, ..HELD_INPUT };
        let mut gate = PrefillGate { started: true, ..PrefillGate::default() };
        let held = (0..100).take_while(|_| !gate.allows_prefill(&all)).count();
        assert_eq!(held, 10, "one step of growth, then ten without, the last of which fires");
        assert_eq!(
            gate,
            PrefillGate { started: true, ..PrefillGate::default() },
            "a fire resets the gate"
        );
    }

    /// Builds two replicas with the given numbers of decode rows and rows in their plans.
    fn replicas(plans: [(usize, usize); 2]) -> Vec<ReplicaState> {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: vec![group] };
        let config =
            SchedulerConfig::new(SchedulerLimits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
        let row =
            |slot| PlannedRow { slot: SlabSlot(slot), start: 0, len: 1, drafts: 0, new_blocks: 0 };
        let domain = |(replica, (decodes, rows)): (u16, (usize, usize))| {
            let mut domain = ReplicaState::new(Replica(replica), &config).unwrap();
            domain.plan.decode_rows = decodes;
            domain.plan.rows = (0..rows as u32).map(row).collect();
            domain
        };
        (0..).zip(plans).map(domain).collect()
    }

    #[test]
    fn gate_input_sums_pending_tokens_and_kv_usage() {
        let limits = SchedulerLimits::cpu(8, 100);
        let mut domains = replicas([(1, 2), (1, 1)]);
        for (domain, (wanted, held)) in domains.iter_mut().zip([(1_000, 6), (100, 2)]) {
            domain.plan.pending_prefill_tokens = wanted;
            domain.kv.allocate(&mut BlockTable::default(), held);
        }
        let seen = gate_input(&domains, &limits);
        assert_eq!(
            seen.pending_prefill_tokens,
            u64::from(limits.tokens_per_step) + 100,
            "no more than a step each"
        );
        assert_eq!(seen.kv_usage, 0.75, "6 of 8 blocks");
        assert!(
            seen.has_partial_prefill,
            "a row of the first rank is neither a decode nor admitted now"
        );
        domains[0].plan.decode_rows = 2;
        assert!(!gate_input(&domains, &limits).has_partial_prefill);
    }

    #[test]
    fn closed_prefill_gate_keeps_decode_rows() {
        let rows = |gate: PrefillGate, plans| {
            let (mut gate, mut domains) = (gate, replicas(plans));
            hold_prefill(&mut gate, &mut domains, &SchedulerLimits::cpu(8, 100));
            (
                domains.iter().map(|domain| domain.plan.rows.len()).collect::<Vec<_>>(),
                gate.held_steps,
            )
        };
        let seen = gate_input(&replicas([(1, 2), (1, 1)]), &SchedulerLimits::cpu(8, 100));
        assert_eq!((seen.ranks, seen.ranks_with_prefill, seen.decode_rows), (2, 1, 2));
        assert_eq!(seen.tokens_per_step, SchedulerLimits::cpu(8, 100).tokens_per_step);
        let both = gate_input(&replicas([(1, 2), (0, 1)]), &SchedulerLimits::cpu(8, 100));
        assert_eq!((both.ranks_with_prefill, both.decode_rows), (2, 1));
        let started = PrefillGate { started: true, ..PrefillGate::default() };
        assert_eq!(rows(started, [(1, 2), (1, 1)]), (vec![1, 1], 1), "held");
        assert_eq!(rows(PrefillGate::default(), [(1, 2), (1, 1)]), (vec![2, 1], 0), "fires");
        assert_eq!(rows(started, [(0, 0), (0, 0)]), (vec![0, 0], 0), "no rank has rows");
    }

    #[test]
    fn dispatch_mode_fits_the_largest_rank() {
        let of = |most, chunk, width| {
            let found = headers_for(most, chunk, &[1, 2, 4, 8], width);
            (found.dispatch, found.moe_tokens, found.draft_rows)
        };
        let graph = |rows, width| DispatchMode::Graph { rows, width };
        assert_eq!(of([3, 3, 0], false, 1), (graph(4, 1), 4, 0));
        assert_eq!(of([3, 40, 0], true, 1), (DispatchMode::Eager { tokens: 40 }, 40, 0));
        assert_eq!(of([9, 9, 0], false, 1), (DispatchMode::Eager { tokens: 9 }, 9, 0));
        assert_eq!(of([3, 5, 2], false, 3), (graph(4, 3), 12, 4), "a recording drafts for all");
        assert_eq!(of([3, 3, 0], false, 3), (graph(4, 3), 12, 4));
        assert_eq!(of([3, 45, 2], true, 3), (DispatchMode::Eager { tokens: 45 }, 45, 2));
    }
}
