//! The scheduler: `tick(now, inbox) -> effects`. It is the only module of the crate that reads messages and
//! time.

mod executor_changes;
mod invariants;
mod lockstep_step;

use crate::admission_control::{QueueBacklog, reject_reason};
use crate::apply::apply;
use crate::lockstep::PrefillGate;
use crate::replica_router::ReplicaRouter;
use crate::replica_state::ReplicaState;
use crate::request::Request;
use crate::request_index::{RequestIndex, RequestLocation};
use crate::slab::SlabSlot;
use crate::stats::RequeueReason;
use crate::{
    AbortCause, ControlCommand, FinishReason, PromptHasher, RejectReason, RequestSubmission,
    SchedulerConfig, SchedulerConfigError, SchedulerEffect, SchedulerEvent, SchedulerLimits,
    SchedulerStats, StepCosts, StopReason, TickPhase, TickTimer, TokenEvent,
};
use kvcache::KvCache;
use protocol::{Epoch, Replica, RequestId, StepOutput};

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

    /// Sets the estimated costs of a replica's steps, by which `SchedulerLimits::max_step_ms` limits prefill chunks.
    pub fn set_step_costs(&mut self, replica: Replica, costs: StepCosts) {
        self.replicas[usize::from(replica.0)].step_costs = Some(costs);
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

    /// Returns the current statistics of a replica, as the next `SchedulerEffect::Stats` would report them.
    pub fn stats(&self, replica: Replica) -> SchedulerStats {
        self.replicas[usize::from(replica.0)].stats(replica)
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
