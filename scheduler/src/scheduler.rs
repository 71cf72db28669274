//! The scheduler: `tick(now, inbox) -> effects`. It is the only module of the crate that reads messages and
//! time.

use crate::admission_control::{QueueBacklog, reject_reason};
use crate::apply::apply;
use crate::commit::{commit, write_batch_rows};
use crate::lockstep::{self, LockstepBatchFields, PrefillGate};
use crate::plan::plan;
use crate::replica_router::{ReplicaLoad, ReplicaRouter};
use crate::replica_state::ReplicaState;
use crate::request::Request;
use crate::request_index::{RequestIndex, RequestLocation};
use crate::slab::SlabSlot;
use crate::stats::RequeueReason;
use crate::{
    AbortCause, ControlCommand, ExecutorFailure, FinishReason, PromptHasher, RejectReason,
    RequestError, RequestSubmission, SchedulerConfig, SchedulerConfigError, SchedulerEffect,
    SchedulerEvent, SchedulerLimits, SchedulerStats, StopReason, TickPhase, TickTimer, TokenEvent,
};
use kvcache::KvCache;
use protocol::{Batch, Epoch, Replica, RequestId, StepOutput};
use std::ops::Range;

/// Schedules every replica and owns every KV block.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    replicas: Vec<ReplicaState>,
    request_index: RequestIndex,
    router: ReplicaRouter,
    prefill_gate: PrefillGate,
    /// Number of accepted submissions, which defines the service order.
    arrivals: u64,
    now_ms: u64,
    /// Token events of this tick that were not emitted yet.
    token_events: Vec<TokenEvent>,
    finished: Vec<SlabSlot>,
    was_idle: bool,
}

impl Scheduler {
    /// Creates an idle scheduler.
    ///
    /// Errors: a limit out of range, or a pool that cannot hold one request of `max_model_len`.
    pub fn new(mut config: SchedulerConfig) -> Result<Self, SchedulerConfigError> {
        config.validate()?;
        let seq_slots = config.limits.seq_slot_count();
        if seq_slots < config.limits.max_num_seqs {
            let (requested, tokens) = (config.limits.max_num_seqs, config.limits.tokens_per_step);
            tracing::warn!(
                requested,
                seq_slots,
                tokens,
                "max_num_seqs is reduced: decode rows must not fill the token budget of a step"
            );
        }
        config.limits.max_num_seqs = seq_slots;
        let replicas = (0..config.replicas).map(|index| ReplicaState::new(Replica(index), &config));
        let replicas = replicas.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            config,
            replicas,
            request_index: RequestIndex::default(),
            router: ReplicaRouter::default(),
            prefill_gate: PrefillGate::default(),
            arrivals: 0,
            now_ms: 0,
            token_events: Vec::new(),
            finished: Vec::new(),
            was_idle: true,
        })
    }

    /// Returns the hasher with which submitters compute `RequestSubmission::block_keys`.
    pub fn hasher(&self) -> PromptHasher {
        PromptHasher::new(self.config.kv.block_hasher(), self.config.kv.caching)
    }

    /// Returns the limits in effect. `max_num_seqs` may be lower than configured, see
    /// `SchedulerLimits::seq_slot_count`.
    pub fn limits(&self) -> &SchedulerLimits {
        &self.config.limits
    }

    /// Returns the current epoch of a replica's executors; outputs with another epoch are dropped.
    pub fn epoch(&self, replica: Replica) -> Epoch {
        self.replicas[usize::from(replica.0)].epoch
    }

    /// Returns the replicas of the lockstep group of `replica`, including `replica`. The replicas of a group
    /// fail together.
    pub fn lockstep_group(&self, replica: Replica) -> impl Iterator<Item = Replica> + use<> {
        self.group_of(usize::from(replica.0)).map(|index| Replica(index as u16))
    }

    /// Returns the KV cache of a replica for reading.
    pub fn kv(&self, replica: Replica) -> &KvCache {
        &self.replicas[usize::from(replica.0)].kv
    }

    /// Returns whether no request is waiting or running and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.replicas.iter().all(|replica| replica.state.is_idle())
    }

    /// Drains `inbox`, plans steps, and appends the resulting effects to `effects`.
    ///
    /// `now_ms` measures queueing times, failure timeouts and block lifetimes; it does not affect plans.
    pub fn tick(
        &mut self,
        now_ms: u64,
        inbox: &mut Vec<SchedulerEvent>,
        effects: &mut Vec<SchedulerEffect>,
    ) {
        self.tick_timed(now_ms, inbox, effects, &mut ());
    }

    /// Runs `tick` and reports the end of each phase to the timer `phase_timer`.
    pub fn tick_timed(
        &mut self,
        now_ms: u64,
        inbox: &mut Vec<SchedulerEvent>,
        effects: &mut Vec<SchedulerEffect>,
        phase_timer: &mut dyn TickTimer,
    ) {
        self.now_ms = self.now_ms.max(now_ms);
        self.replicas.iter_mut().for_each(|replica| replica.kv.set_time(self.now_ms));
        for event in inbox.drain(..) {
            self.handle_event(event, effects);
        }
        self.fail_expired_requests();
        phase_timer.phase_done(TickPhase::Apply);
        for group in self.groups() {
            while self.step(group.clone(), effects, phase_timer) {}
        }
        self.emit_effects(effects);
        let idle = self.is_idle();
        if idle && !self.was_idle {
            self.check_requests();
        }
        self.was_idle = idle;
    }

    fn handle_event(&mut self, event: SchedulerEvent, effects: &mut Vec<SchedulerEffect>) {
        match event {
            SchedulerEvent::Submit(submit) => self.submit(*submit),
            SchedulerEvent::Abort { request, cause } => self.abort(request, cause),
            SchedulerEvent::Control(ControlCommand::ClearPrefixCache {
                op_id,
                requeue_running,
            }) => {
                let done = self.clear_prefix_cache(requeue_running);
                effects.push(SchedulerEffect::ControlDone { op_id, succeeded: done });
            }
            SchedulerEvent::StepOutput { replica, output } => self.handle_output(replica, output),
            SchedulerEvent::ExecutorsFailed { replica, failure } => {
                self.handle_executor_failure(replica, failure);
            }
            SchedulerEvent::ExecutorsReady { replica, blocks, capture_sizes } => {
                self.handle_executors_ready(replica, blocks, capture_sizes, effects);
            }
            SchedulerEvent::MaskReady { request, output_tokens, wait_for_next } => {
                self.mask_ready(request, output_tokens, wait_for_next);
            }
            SchedulerEvent::MasksDone { request } => self.masks_done(request),
        }
    }

    fn mask_ready(&mut self, id: RequestId, output_tokens: u32, wait_for_next: bool) {
        let Some(&RequestLocation { replica, slot }) = self.request_index.get(&id) else { return };
        let request = &mut self.replicas[replica].state.requests[slot];
        if request.len - request.cold_fields.prompt_len == output_tokens {
            request.mask_state.on_ready(wait_for_next);
        }
    }

    fn masks_done(&mut self, id: RequestId) {
        if let Some(&RequestLocation { replica, slot }) = self.request_index.get(&id) {
            self.replicas[replica].state.requests[slot].mask_state.end();
        }
    }

    /// Clears the prefix cache of every replica. Returns false, without clearing, if requests hold blocks and
    /// `requeue_running` is false.
    fn clear_prefix_cache(&mut self, requeue_running: bool) -> bool {
        let in_use = self.replicas.iter().any(|replica| replica.kv.counts().in_use > 0);
        if in_use && !requeue_running {
            return false;
        }
        for replica in &mut self.replicas {
            replica.requeue_running(RequeueReason::Reset);
            replica.kv.clear();
            replica.stats_changed = true;
        }
        true
    }

    fn submit(&mut self, submit: RequestSubmission) {
        let is_duplicate = self.request_index.contains_key(&submit.id);
        assert!(!is_duplicate, "request id {:?} is already in use", submit.id);
        if let Some(reason) = self.reject_reason(&submit) {
            let request = submit.id;
            self.token_events
                .push(TokenEvent::finished(request, FinishReason::Rejected(Box::new(reason))));
            return;
        }
        let replica = self.route(&submit);
        self.arrivals += 1;
        let request = Request::new(submit, self.arrivals, self.now_ms, &self.config);
        self.enqueue(replica, request);
    }

    fn reject_reason(&self, submit: &RequestSubmission) -> Option<RejectReason> {
        let pools = self.replicas.iter().map(|replica| replica.kv.counts().pool);
        let backlog = QueueBacklog {
            requests: self.replicas.iter().map(|d| d.state.waiting.len() as u32).sum(),
            tokens: self.replicas.iter().map(|d| d.state.waiting_tokens).sum(),
        };
        reject_reason(submit, &self.config, pools.min().unwrap_or(0), backlog)
    }

    fn route(&mut self, submit: &RequestSubmission) -> usize {
        if self.replicas.len() == 1 {
            return 0;
        }
        let candidates: Vec<_> = self.replicas.iter().map(ReplicaState::candidate).collect();
        let replica = self.router.route(submit, self.config.routing, &candidates);
        usize::from(replica.0)
    }

    /// Adds a request without blocks to a replica's waiting queue.
    fn enqueue(&mut self, replica: usize, mut request: Request) {
        let target = &mut self.replicas[replica];
        if self.config.kv.caching {
            request.extend_block_keys(&target.state.hasher);
        }
        target.load.charge(request.cold_fields.params.load_tokens);
        target.stats_changed = true;
        let id = request.id;
        let slot = target.state.enqueue(request);
        self.request_index.insert(id, RequestLocation { replica, slot });
    }

    /// Finishes a waiting or running request immediately: its blocks are freed before the next step is
    /// planned, and its results in flight are dropped.
    fn abort(&mut self, id: RequestId, cause: AbortCause) {
        let finish = match cause {
            AbortCause::StopString => FinishReason::Stop(StopReason::StopString),
            cause => FinishReason::Abort(cause),
        };
        self.finish_request(id, finish);
    }

    fn finish_request(&mut self, id: RequestId, finish: FinishReason) {
        let Some(&RequestLocation { replica, slot }) = self.request_index.get(&id) else { return };
        let ReplicaState { state, kv, load, stats_changed, .. } = &mut self.replicas[replica];
        let request = &state.requests[slot];
        let key = request.cold_fields.queue_key;
        if request.seq_slot.is_some() {
            state.running.remove(key);
            state.release(slot, kv);
        } else {
            state.waiting_tokens -= u64::from(request.len);
            state.waiting.remove(key);
        }
        let mut request = state.requests.remove(slot);
        load.release(request.cold_fields.params.load_tokens);
        *stats_changed = true;
        self.request_index.remove(&id);
        request.push_event(&mut self.token_events).finish_reason = Some(finish);
    }

    fn handle_output(&mut self, replica: Replica, output: StepOutput) {
        let index = usize::from(replica.0);
        let replica = &mut self.replicas[index];
        replica.stats_changed = true;
        if output.epoch != replica.epoch || !replica.is_ready() {
            replica.state.totals.outputs_dropped += 1;
            return;
        }
        replica.timing = output.timing;
        let ReplicaState { state, kv, .. } = replica;
        apply(state, kv, &self.config.limits, output, &mut self.token_events, &mut self.finished);
        if !self.finished.is_empty() {
            self.remove_finished(index);
        }
        let replica = &self.replicas[index];
        replica.state.check_counters(&replica.kv, self.config.limits.max_num_seqs);
    }

    /// Removes the requests that `apply` finished. Their blocks and sequence slots have already been freed.
    fn remove_finished(&mut self, replica: usize) {
        let ReplicaState { state, load, .. } = &mut self.replicas[replica];
        for slot in self.finished.drain(..) {
            let request = state.requests.remove(slot);
            load.release(request.cold_fields.params.load_tokens);
            self.request_index.remove(&request.id);
        }
        let requests = &state.requests;
        state.running.retain(|slot| requests.get(slot).is_some());
    }

    /// Handles an executor failure. In lockstep, all replicas of the group fail. Without lockstep, the
    /// waiting requests of the failed replica migrate to ready replicas.
    fn handle_executor_failure(&mut self, replica: Replica, failure: ExecutorFailure) {
        let replica = usize::from(replica.0);
        for failed in self.group_of(replica) {
            self.replicas[failed].on_executor_failure(self.now_ms, failure);
        }
        self.migrate_queue(replica);
    }

    /// Migrates waiting requests of a failed replica to ready replicas with large enough pools. Ranks of a
    /// lockstep group cannot migrate requests.
    fn migrate_queue(&mut self, from: usize) {
        if self.config.lockstep || self.replicas[from].is_ready() {
            return;
        }
        let waiting: Vec<SlabSlot> = self.replicas[from].state.waiting.slots().collect();
        for slot in waiting {
            self.migrate_request(from, slot);
        }
    }

    /// Migrates a waiting request to the ready replica with the lowest load among those with a large enough
    /// KV pool, unless the client selected the replica. Returns whether the request migrated. Pool sizes
    /// differ if executors were restarted with less memory.
    fn migrate_request(&mut self, from: usize, slot: SlabSlot) -> bool {
        let request = &self.replicas[from].state.requests[slot];
        let (limit, pinned) = (request.limit, request.cold_fields.params.pinned_to_replica);
        let can_host =
            |&i: &usize| i != from && self.replicas[i].is_ready() && self.pool_can_hold(i, limit);
        let targets = (0..self.replicas.len()).filter(can_host);
        let least_loaded = targets.min_by_key(|&i| (self.replicas[i].load.tokens, i));
        let Some(to) = least_loaded.filter(|_| !pinned) else { return false };
        let ReplicaState { state, load, stats_changed, .. } = &mut self.replicas[from];
        let request = state.requests.remove(slot);
        state.waiting.remove(request.cold_fields.queue_key);
        state.waiting_tokens -= u64::from(request.len);
        load.release(request.cold_fields.params.load_tokens);
        *stats_changed = true;
        self.enqueue(to, request);
        true
    }

    /// Returns whether a replica's pool can hold a request of `limit` tokens.
    fn pool_can_hold(&self, replica: usize, limit: u32) -> bool {
        let kv = &self.replicas[replica].kv;
        let in_flight = self.config.limits.request_tokens_in_flight();
        self.config.kv.spec.blocks_of_request(limit, in_flight) <= kv.counts().pool
    }

    /// Handles a replica whose executors have been restored. Requests that no longer fit its KV pool migrate
    /// or fail; waiting requests of replicas that are still failed may migrate to it.
    fn handle_executors_ready(
        &mut self,
        replica: Replica,
        blocks: u32,
        capture_sizes: Vec<u32>,
        effects: &mut Vec<SchedulerEffect>,
    ) {
        let index = usize::from(replica.0);
        let restored = &mut self.replicas[index];
        if restored.is_ready() {
            return;
        }
        flush_kv_events(replica, restored, effects);
        restored.on_executors_restored(&self.config.kv, blocks, capture_sizes);
        restored.kv.set_time(self.now_ms);
        let state = &self.replicas[index].state;
        let waiting = state.waiting.slots().map(|slot| (slot, &state.requests[slot]));
        let too_large = waiting.filter(|(_, request)| !self.pool_can_hold(index, request.limit));
        let too_large: Vec<_> = too_large.map(|(slot, request)| (slot, request.id)).collect();
        for (slot, id) in too_large {
            if self.config.lockstep || !self.migrate_request(index, slot) {
                self.finish_request(id, FinishReason::Error(RequestError::ReplicaUnavailable));
            }
        }
        for failed in 0..self.replicas.len() {
            self.migrate_queue(failed);
        }
    }

    /// Fails the waiting requests of replicas that have been failed for longer than the failure timeout.
    fn fail_expired_requests(&mut self) {
        let timeout = self.config.limits.failure_timeout_ms;
        for index in 0..self.replicas.len() {
            let replica = &self.replicas[index];
            let expired = |since: u64| self.now_ms.saturating_sub(since) >= timeout;
            if !replica.failed_at_ms.is_some_and(expired) || replica.state.waiting.is_empty() {
                continue;
            }
            let waiting = replica.state.waiting.slots();
            let ids: Vec<_> = waiting.map(|slot| replica.state.requests[slot].id).collect();
            for id in ids {
                self.finish_request(id, FinishReason::Error(RequestError::ReplicaUnavailable));
            }
        }
    }

    /// Returns the groups of replicas that run each step together: one lockstep group, or each replica alone.
    fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = self.replicas.len();
        let size = if self.config.lockstep { count } else { 1 };
        (0..count).step_by(size).map(move |first| first..first + size)
    }

    fn group_of(&self, replica: usize) -> Range<usize> {
        if self.config.lockstep { 0..self.replicas.len() } else { replica..replica + 1 }
    }

    /// Plans and sends one step of a group of replicas that step together. Returns whether another step may
    /// follow in this tick.
    fn step(
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
            replica.plan = plan(&replica.state, &replica.kv, limits, recycled);
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
    fn emit_effects(&mut self, effects: &mut Vec<SchedulerEffect>) {
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

    /// Returns the current statistics of a replica, as the next `SchedulerEffect::Stats` would report them.
    pub fn stats(&self, replica: Replica) -> SchedulerStats {
        self.replicas[usize::from(replica.0)].stats(replica)
    }

    /// Recomputes the block reference counts from the block tables, and the counters from the requests;
    /// panics on a difference. Visits every block of every KV pool.
    pub fn check(&self) {
        for replica in &self.replicas {
            replica.kv.check(replica.state.block_tables());
            replica.kv.check_states(replica.state.state_slots());
            let in_flight = self.config.limits.request_tokens_in_flight();
            let spec = &self.config.kv.spec;
            replica.state.check_reserves(|len| spec.blocks_of_request(len, in_flight));
        }
        self.check_requests();
    }

    /// Recomputes the counters of requests and sequence slots; panics on a difference. The check runs in the
    /// tick in which the scheduler becomes idle and delays requests that arrive then, so its cost must not
    /// depend on the number of blocks.
    fn check_requests(&self) {
        let mut live = 0;
        for (index, replica) in self.replicas.iter().enumerate() {
            replica.state.check(&replica.kv, self.config.limits.max_num_seqs);
            let mut load = ReplicaLoad::default();
            for (slot, request) in replica.state.requests.iter() {
                let location = self.request_index.get(&request.id);
                assert_eq!(
                    location,
                    Some(&RequestLocation { replica: index, slot }),
                    "{:?} is not in the request index",
                    request.id
                );
                load.charge(request.cold_fields.params.load_tokens);
                live += 1;
            }
            assert_eq!(load, replica.load, "load of replica {index} miscounted");
        }
        assert_eq!(live, self.request_index.len(), "a finished request is still indexed");
    }
}

/// Emits the changes of a replica's prefix index, and the lifetimes of evicted blocks.
fn flush_kv_events(replica: Replica, state: &mut ReplicaState, effects: &mut Vec<SchedulerEffect>) {
    if state.kv.has_events() {
        effects.push(SchedulerEffect::KvEvents { replica, events: state.kv.take_events() });
    }
    if state.kv.has_lifetimes() {
        effects
            .push(SchedulerEffect::BlocksEvicted { replica, lifetimes: state.kv.take_lifetimes() });
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
