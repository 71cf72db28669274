//! State of one replica: requests, KV cache, executor epoch and statistics.

use crate::plan::StepPlan;
use crate::replica_router::{ReplicaCandidate, ReplicaLoad};
use crate::scheduling_state::ReplicaRequests;
use crate::stats::RequeueReason;
use crate::{
    BlockStats, ExecutorFailure, SchedulerConfig, SchedulerConfigError, SchedulerStats,
    StateSlotStats, StepCosts,
};
use kvcache::{KvCache, KvConfig, StateSlotCounts};
use protocol::{Epoch, Replica, StepTiming};

/// State that the scheduler keeps per replica.
#[derive(Debug)]
pub(crate) struct ReplicaState {
    pub(crate) state: ReplicaRequests,
    pub(crate) kv: KvCache,
    /// Epoch of the replica's executors, incremented when they fail. Outputs of an earlier epoch are dropped.
    pub(crate) epoch: Epoch,
    /// Time at which the executors failed; `None` = ready.
    pub(crate) failed_at_ms: Option<u64>,
    pub(crate) capture_sizes: Vec<u32>,
    pub(crate) load: ReplicaLoad,
    /// Plan of the current step; its buffers are reused.
    pub(crate) plan: StepPlan,
    /// Whether the statistics changed since the last `SchedulerEffect::Stats`.
    pub(crate) stats_changed: bool,
    pub(crate) last_step_rows: u32,
    pub(crate) last_step_tokens: u32,
    pub(crate) timing: StepTiming,
    /// Estimated costs of steps; `None` until the first step has completed.
    pub(crate) step_costs: Option<StepCosts>,
}

impl ReplicaState {
    pub(crate) fn new(
        replica: Replica,
        config: &SchedulerConfig,
    ) -> Result<Self, SchedulerConfigError> {
        let seq_slots = config.limits.seq_slot_count();
        Ok(Self {
            state: ReplicaRequests::new(replica, seq_slots, &config.kv),
            kv: KvCache::new(&config.kv)?,
            epoch: Epoch(1),
            failed_at_ms: None,
            capture_sizes: config.capture_sizes.clone(),
            load: ReplicaLoad::default(),
            plan: StepPlan::default(),
            stats_changed: true,
            last_step_rows: 0,
            last_step_tokens: 0,
            timing: StepTiming::default(),
            step_costs: None,
        })
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.failed_at_ms.is_none()
    }

    pub(crate) fn candidate(&self) -> ReplicaCandidate<'_> {
        ReplicaCandidate { ready: self.is_ready(), load: self.load, kv: &self.kv }
    }

    /// Records the number of rows and tokens of the step just sent, for the statistics.
    pub(crate) fn record_step(&mut self) {
        (self.last_step_rows, self.last_step_tokens) =
            (self.plan.rows.len() as u32, self.plan.tokens());
        self.stats_changed = true;
    }

    /// Handles an executor failure: running requests are requeued and recomputed from their committed tokens,
    /// and outputs of the previous epoch are dropped.
    pub(crate) fn on_executor_failure(&mut self, now_ms: u64, failure: ExecutorFailure) {
        self.state.totals.requests_recovered.add(failure, self.state.running.len() as u64);
        self.requeue_running(RequeueReason::ExecutorFailure(failure));
        while let Some(scheduled) = self.state.steps_in_flight.pop_front() {
            self.state.recycle_rows(scheduled.rows);
        }
        self.kv.clear();
        self.epoch = self.epoch.next();
        self.failed_at_ms.get_or_insert(now_ms);
        self.stats_changed = true;
    }

    /// Moves every running request back to the waiting queue and frees its blocks.
    pub(crate) fn requeue_running(&mut self, reason: RequeueReason) {
        let running: Vec<_> = self.state.running.slots().collect();
        self.state.running.retain(|_| false);
        // Requests are requeued in reverse order, so that the cached blocks of later requests are freed, and
        // thus evicted, before the cached blocks of earlier requests.
        for slot in running.into_iter().rev() {
            self.state.requeue(slot, &mut self.kv, reason);
        }
        self.state.blocked_head = None;
    }

    /// Marks the replica as ready, with an empty pool of `blocks` blocks; 0 keeps the pool size.
    pub(crate) fn on_executors_restored(
        &mut self,
        kv: &KvConfig,
        blocks: u32,
        capture_sizes: Vec<u32>,
    ) {
        if blocks != self.kv.counts().pool && blocks > 0 {
            let kv = KvConfig { blocks, ..kv.clone() };
            self.kv = KvCache::new(&kv).expect("the configuration is valid for any pool size");
        }
        self.capture_sizes = capture_sizes;
        self.failed_at_ms = None;
        self.stats_changed = true;
    }

    /// Returns current statistics.
    pub(crate) fn stats(&self, replica: Replica) -> SchedulerStats {
        let (state, totals, counts) = (&self.state, self.state.totals, self.kv.counts());
        let queue_head = state.waiting.slots().next();
        SchedulerStats {
            replica,
            executors_ready: self.is_ready(),
            step: state.step,
            steps_in_flight: state.steps_in_flight.len() as u32,
            running: state.running.len() as u32,
            waiting: state.waiting.len() as u32,
            waiting_tokens: state.waiting_tokens,
            head_submitted_ms: queue_head
                .map(|slot| state.requests[slot].cold_fields.params.submitted_ms),
            blocks: BlockStats {
                pool: counts.pool,
                free: counts.free,
                cached: counts.cached,
                in_use: counts.in_use,
                reserved: state.reserved_blocks,
            },
            state_slots: self.state_slot_stats(),
            last_step_rows: self.last_step_rows,
            last_step_tokens: self.last_step_tokens,
            timing: self.timing,
            steps_total: totals.steps,
            prompt_tokens_total: totals.prompt_tokens,
            prompt_tokens_cached_total: totals.prompt_tokens_cached,
            generated_tokens_total: totals.generated_tokens,
            drafts_total: totals.drafts,
            preemptions_total: totals.preemptions,
            requests_recovered_total: totals.requests_recovered,
            tokens_recomputed_total: totals.recomputed_tokens,
            prefix_queries_total: totals.prefix_queries,
            prefix_hits_total: totals.prefix_hits,
            kv_group_hits_total: state.kv_group_hits.to_vec(),
            rows_dropped_total: totals.rows_dropped,
            outputs_dropped_total: totals.outputs_dropped,
        }
    }

    /// Returns the state slots of the first state group by use.
    fn state_slot_stats(&self) -> StateSlotStats {
        let states = self.kv.states();
        if states.is_empty() {
            return StateSlotStats::default();
        }
        let StateSlotCounts { pool, free, checkpoints, in_use } = states.counts(0);
        StateSlotStats { pool, free, checkpoints, in_use }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SchedulerLimits;
    use protocol::{KvGroup, KvKind, KvSpec};

    #[test]
    fn pool_size_follows_the_restored_executors() {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: vec![group] };
        let config =
            SchedulerConfig::new(SchedulerLimits::cpu(8, 100), KvConfig::new(spec, 8, [1, 2]));
        let mut replica = ReplicaState::new(Replica(0), &config).unwrap();
        for (blocks, pool) in [(8, 8), (3, 3), (0, 3), (9, 9)] {
            replica.on_executor_failure(0, ExecutorFailure::Exited);
            assert!(!replica.is_ready());
            replica.on_executors_restored(&config.kv, blocks, Vec::new());
            assert!(replica.is_ready());
            assert_eq!(replica.kv.counts().pool, pool, "0 keeps the pool size");
        }
    }
}
