//! Steps of groups of replicas that step together.

use super::Scheduler;
use crate::commit::{commit, write_batch_rows};
use crate::lockstep::{self, LockstepBatchFields};
use crate::plan::plan;
use crate::replica_state::ReplicaState;
use crate::{SchedulerEffect, TickPhase, TickTimer};
use protocol::{Batch, Replica};
use std::ops::Range;

/// Emits the changes of a replica's prefix index, and the lifetimes of evicted blocks.
pub(super) fn flush_kv_events(
    replica: Replica,
    state: &mut ReplicaState,
    effects: &mut Vec<SchedulerEffect>,
) {
    if state.kv.has_events() {
        effects.push(SchedulerEffect::KvEvents { replica, events: state.kv.take_events() });
    }
    if state.kv.has_lifetimes() {
        effects
            .push(SchedulerEffect::BlocksEvicted { replica, lifetimes: state.kv.take_lifetimes() });
    }
}

impl Scheduler {
    /// Returns the groups of replicas that run each step together: one lockstep group, or each replica alone.
    pub(super) fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = self.replicas.len();
        let size = if self.config.lockstep { count } else { 1 };
        (0..count).step_by(size).map(move |first| first..first + size)
    }

    pub(super) fn group_of(&self, replica: usize) -> Range<usize> {
        if self.config.lockstep { 0..self.replicas.len() } else { replica..replica + 1 }
    }

    /// Plans and sends one step of a group of replicas that step together. Returns whether another step may
    /// follow in this tick.
    pub(super) fn step(
        &mut self,
        group: Range<usize>,
        effects: &mut Vec<SchedulerEffect>,
        phase_timer: &mut dyn TickTimer,
    ) -> bool {
        let limits = &self.config.limits;
        let replicas = &mut self.replicas[group.clone()];
        let has_capacity =
            |d: &ReplicaState| d.state.steps_in_flight.len() < limits.steps_in_flight as usize;
        if !replicas.iter().all(|replica| replica.is_ready() && has_capacity(replica)) {
            return false;
        }
        for replica in &mut *replicas {
            let recycled = std::mem::take(&mut replica.plan);
            let (state, kv, costs) = (&replica.state, &replica.kv, replica.step_costs);
            replica.plan = plan(state, kv, limits, costs, recycled);
        }
        if self.config.lockstep && self.config.prefill_gate {
            lockstep::delay_prefill(&mut self.prefill_gate, replicas, limits);
        }
        phase_timer.phase_done(TickPhase::Plan);
        let has_rows = replicas.iter().any(|replica| !replica.plan.rows.is_empty());
        // If the plans preempt requests and have no rows, another step may still follow in this tick: the
        // freed blocks may allow an admission.
        let may_continue =
            has_rows || replicas.iter().any(|replica| !replica.plan.preempt.is_empty());
        let LockstepBatchFields { dispatch, moe_tokens, draft_rows } =
            lockstep::batch_headers(replicas, limits);
        let lockstep_only = |count: u32| if self.config.lockstep { count } else { 0 };
        let (moe_tokens, draft_rows) = (lockstep_only(moe_tokens), lockstep_only(draft_rows));
        for (i, replica) in group.zip(replicas) {
            let ReplicaState { state, kv, plan, .. } = replica;
            commit(state, kv, plan, self.now_ms);
            if has_rows {
                let rows = write_batch_rows(state, kv, &plan.rows, limits);
                replica.record_step();
                let (step, epoch) = (replica.state.step, replica.epoch);
                let batch = Batch { step, epoch, dispatch, moe_tokens, draft_rows, rows };
                effects.push(SchedulerEffect::SendBatch { replica: Replica(i as u16), batch });
            }
        }
        phase_timer.phase_done(TickPhase::Commit);
        may_continue
    }

    /// Emits the token events, prefix index changes and statistics of this tick.
    pub(super) fn emit_effects(&mut self, effects: &mut Vec<SchedulerEffect>) {
        if !self.token_events.is_empty() {
            let capacity = self.token_events.len();
            let events = std::mem::replace(&mut self.token_events, Vec::with_capacity(capacity));
            effects.push(SchedulerEffect::TokenEvents(events));
        }
        for (i, replica) in self.replicas.iter_mut().enumerate() {
            let id = Replica(i as u16);
            flush_kv_events(id, replica, effects);
            if std::mem::take(&mut replica.stats_changed) {
                effects.push(SchedulerEffect::Stats(replica.stats(id)));
            }
        }
    }
}
