//! Steps of replicas that share collectives: one plan for all, headers agreed by assignment.
//!
//! When nobody has work nothing is sent; when anybody has, every rank gets a batch, an empty one if
//! need be. No collective, clock or coordinator takes part.

use crate::Limits;
use crate::domain::Domain;
use crate::plan::Plan;
use protocol::Bucket;

/// KV usage from which on prefill is never held: finished requests are what frees blocks.
const KV_USAGE_FULL: f64 = 0.9;
/// Share of the group's token budget that makes a prefill step worth its while.
const FILL_ENOUGH: f64 = 0.9;
/// Group steps without growth of the pending tokens after which waiting longer is in vain.
const STALLED_STEPS: u32 = 10;
/// Group steps that a started prompt, or any prompt, is held at most.
const HELD_MAX_PARTIAL: u32 = 100;
const HELD_MAX: u32 = 200;

/// Decides when a lockstep group prefills: one rank's chunk makes every rank run eagerly, so chunks
/// of several ranks should fall into the same step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Gate {
    started: bool,
    /// Group steps held in a row.
    held: u32,
    /// Pending tokens when they last grew, and group steps since.
    pending: u64,
    stalled: u32,
}

/// What the gate looks at in one group step.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GateView {
    /// Ranks in the group.
    pub(crate) ranks: u32,
    /// Ranks whose plan holds prefill; what cannot be admitted does not count.
    pub(crate) ranks_with_prefill: u32,
    /// Tokens these ranks' requests want, each rank capped at one step's budget.
    pub(crate) pending: u64,
    /// Budget of one rank's step.
    pub(crate) tokens_per_step: u32,
    /// Decode rows over all ranks.
    pub(crate) decodes: usize,
    /// Largest share of KV blocks in use on any rank.
    pub(crate) kv_usage: f64,
    /// Whether some prompt has been started and not finished.
    pub(crate) partial: bool,
}

impl Gate {
    /// Whether all passes run in this step (`true`) or decodes only.
    pub(crate) fn fires(&mut self, view: &GateView) -> bool {
        let grown = view.pending > self.pending;
        self.stalled = if grown { 0 } else { self.stalled + 1 };
        self.pending = self.pending.max(view.pending);
        let fires = self.decide(view);
        if fires {
            *self = Self { started: true, ..Self::default() };
        } else {
            self.held += 1;
        }
        fires
    }

    fn decide(&self, view: &GateView) -> bool {
        let must = !self.started
            || view.ranks_with_prefill == 0
            || view.decodes == 0
            || view.kv_usage >= KV_USAGE_FULL
            || self.held >= HELD_MAX
            || (view.partial && self.held >= HELD_MAX_PARTIAL);
        if must {
            return true;
        }
        if view.ranks_with_prefill < view.ranks {
            return false;
        }
        let budget = u64::from(view.ranks_with_prefill) * u64::from(view.tokens_per_step);
        view.pending as f64 >= FILL_ENOUGH * budget as f64 || self.stalled >= STALLED_STEPS
    }
}

/// Withdraws the prefill of every plan if the gate says so. `for_ever`: or if not all ranks have some.
pub(crate) fn hold_prefill(
    gate: &mut Gate,
    domains: &mut [Domain],
    limits: &Limits,
    for_ever: bool,
) {
    if domains.iter().all(|domain| domain.plan.rows.is_empty()) {
        return;
    }
    let view = view(domains, limits);
    let fires = gate.fires(&view);
    if !fires || for_ever && view.ranks_with_prefill < view.ranks {
        for domain in domains {
            domain.plan.hold_prefill();
        }
    }
}

fn view(domains: &[Domain], limits: &Limits) -> GateView {
    let mut view = GateView {
        ranks: domains.len() as u32,
        tokens_per_step: limits.tokens_per_step,
        ..GateView::default()
    };
    for Domain { plan, kv, .. } in domains {
        let counts = kv.counts();
        let usage = f64::from(counts.in_use) / f64::from(counts.pool);
        view.ranks_with_prefill += u32::from(plan.rows.len() > plan.decodes);
        view.pending += plan.prefill_wanted.min(u64::from(limits.tokens_per_step));
        view.decodes += plan.decodes;
        view.kv_usage = view.kv_usage.max(usage);
        view.partial |= plan.has_partial();
    }
    view
}

/// Header fields of every batch of one group step: all ranks get the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Headers {
    pub(crate) bucket: Bucket,
    /// Tokens that MoE layers are padded to.
    pub(crate) moe_tokens: u32,
    /// Rows that passes of a draft layer are padded to.
    pub(crate) draft_rows: u32,
}

/// Headers for these plans. All rows decode: the smallest captured graph that holds the largest rank. Any chunk
/// anywhere, or no such graph: everybody runs eagerly.
pub(crate) fn headers(domains: &[Domain], limits: &Limits) -> Headers {
    let plans = || domains.iter().map(|domain| &domain.plan);
    let most = |of: fn(&Plan) -> u32| plans().map(of).max().unwrap_or(0);
    let has_chunk = plans().any(Plan::has_chunk);
    // Ranks of a group capture the same graphs.
    let graph_rows = domains.first().map_or(&[][..], |domain| &domain.graph_rows);
    let of = [|plan: &Plan| plan.rows.len() as u32, Plan::tokens, Plan::draft_rows].map(most);
    dispatch(of, has_chunk, graph_rows, 1 + u32::from(limits.drafts))
}

/// For the most rows, tokens and rows up to the last with drafts of any rank.
fn dispatch(
    [rows, tokens, draft_rows]: [u32; 3],
    chunk: bool,
    graphs: &[u32],
    width: u32,
) -> Headers {
    match graphs.iter().copied().find(|&graph| graph >= rows && !chunk) {
        Some(rows) => Headers {
            bucket: Bucket::Graph { rows, width },
            moe_tokens: rows * width,
            // A recording drafts behind all of its rows, whoever has some.
            draft_rows: if width > 1 { rows } else { 0 },
        },
        None => Headers { bucket: Bucket::Eager { tokens }, moe_tokens: tokens, draft_rows },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineConfig;
    use crate::plan::PlannedRow;
    use crate::slab::Slot;
    use kvcache::{KvConfig, Table};
    use protocol::{KvGroup, KvKind, KvSpec, Replica};

    const HELD: GateView = GateView {
        ranks: 4,
        ranks_with_prefill: 2,
        pending: 100,
        tokens_per_step: 100,
        decodes: 8,
        kv_usage: 0.5,
        partial: false,
    };

    /// Whether a started gate, held for `held` steps, fires on `view`.
    fn fires(held: u32, view: GateView) -> bool {
        Gate { started: true, held, ..Gate::default() }.fires(&view)
    }

    #[test]
    fn gate_table() {
        assert!(Gate::default().fires(&HELD), "first step");
        let plenty = GateView { pending: 400, ..HELD };
        assert!(!fires(0, plenty), "some ranks have no prefill, the others more than a step of it");
        assert!(fires(0, GateView { ranks_with_prefill: 0, ..HELD }), "nothing to hold");
        assert!(fires(0, GateView { decodes: 0, ..HELD }), "nothing else to run");
        assert!(fires(0, GateView { kv_usage: 0.9, ..HELD }), "blocks run out");
        assert!(!fires(199, HELD) && fires(200, HELD), "held long enough");
        let partial = GateView { partial: true, ..HELD };
        assert!(!fires(99, partial) && fires(100, partial), "a started prompt waits less");
        let all = GateView { ranks_with_prefill: 4, ..HELD };
        assert!(!fires(0, all), "all ranks, little work");
        assert!(fires(0, GateView { pending: 360, ..all }), "all ranks, nine tenths full");
    }

    #[test]
    fn gate_fires_when_pending_work_stops_growing() {
        let all = GateView { ranks_with_prefill: 4, ..HELD };
        let mut gate = Gate { started: true, ..Gate::default() };
        let held = (0..100).take_while(|_| !gate.fires(&all)).count();
        assert_eq!(held, 10, "one step of growth, then ten without, the last of which fires");
        assert_eq!(gate, Gate { started: true, ..Gate::default() }, "a fire resets the gate");
    }

    /// Replicas whose plans have so many decodes and rows.
    fn domains(plans: [(usize, usize); 2]) -> Vec<Domain> {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: vec![group] };
        let config = EngineConfig::new(Limits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
        let row = |slot| PlannedRow { slot: Slot(slot), start: 0, len: 1, drafts: 0, grow: 0 };
        let domain = |(replica, (decodes, rows)): (u16, (usize, usize))| {
            let mut domain = Domain::new(Replica(replica), &config).unwrap();
            domain.plan.decodes = decodes;
            domain.plan.rows = (0..rows as u32).map(row).collect();
            domain
        };
        (0..).zip(plans).map(domain).collect()
    }

    #[test]
    fn a_gate_sees_what_the_ranks_want_and_hold() {
        let limits = Limits::cpu(8, 100);
        let mut domains = domains([(1, 2), (1, 1)]);
        for (domain, (wanted, held)) in domains.iter_mut().zip([(1_000, 6), (100, 2)]) {
            domain.plan.prefill_wanted = wanted;
            domain.kv.grow(&mut Table::default(), held);
        }
        let seen = view(&domains, &limits);
        assert_eq!(
            seen.pending,
            u64::from(limits.tokens_per_step) + 100,
            "no more than a step each"
        );
        assert_eq!(seen.kv_usage, 0.75, "6 of 8 blocks");
        assert!(seen.partial, "a row of the first rank is neither a decode nor admitted now");
        domains[0].plan.decodes = 2;
        assert!(!view(&domains, &limits).partial);
    }

    #[test]
    fn a_gate_that_does_not_fire_leaves_decodes_alone() {
        let rows = |gate: Gate, plans, for_ever| {
            let (mut gate, mut domains) = (gate, domains(plans));
            hold_prefill(&mut gate, &mut domains, &Limits::cpu(8, 100), for_ever);
            (domains.iter().map(|domain| domain.plan.rows.len()).collect::<Vec<_>>(), gate.held)
        };
        let seen = view(&domains([(1, 2), (1, 1)]), &Limits::cpu(8, 100));
        assert_eq!((seen.ranks, seen.ranks_with_prefill, seen.decodes), (2, 1, 2));
        assert_eq!(seen.tokens_per_step, Limits::cpu(8, 100).tokens_per_step);
        let both = view(&domains([(1, 2), (0, 1)]), &Limits::cpu(8, 100));
        assert_eq!((both.ranks_with_prefill, both.decodes), (2, 1));
        let started = Gate { started: true, ..Gate::default() };
        assert_eq!(rows(started, [(1, 2), (1, 1)], false), (vec![1, 1], 1), "held");
        assert_eq!(rows(Gate::default(), [(1, 2), (1, 1)], false), (vec![2, 1], 0), "fires");
        assert_eq!(rows(started, [(0, 0), (0, 0)], false), (vec![0, 0], 0), "nobody waits");
        let first = Gate::default();
        assert_eq!(rows(first, [(1, 2), (1, 1)], true), (vec![1, 1], 0), "not all have prefill");
        assert_eq!(rows(first, [(1, 2), (1, 2)], true), (vec![2, 2], 0), "all have");
    }

    #[test]
    fn dispatch_fits_the_largest_rank() {
        let of = |most, chunk, width| {
            let found = dispatch(most, chunk, &[1, 2, 4, 8], width);
            (found.bucket, found.moe_tokens, found.draft_rows)
        };
        let graph = |rows, width| Bucket::Graph { rows, width };
        assert_eq!(of([3, 3, 0], false, 1), (graph(4, 1), 4, 0));
        assert_eq!(of([3, 40, 0], true, 1), (Bucket::Eager { tokens: 40 }, 40, 0));
        assert_eq!(of([9, 9, 0], false, 1), (Bucket::Eager { tokens: 9 }, 9, 0));
        assert_eq!(of([3, 5, 2], false, 3), (graph(4, 3), 12, 4), "a recording drafts for all");
        assert_eq!(of([3, 3, 0], false, 3), (graph(4, 3), 12, 4));
        assert_eq!(of([3, 45, 2], true, 3), (Bucket::Eager { tokens: 45 }, 45, 2));
    }
}
