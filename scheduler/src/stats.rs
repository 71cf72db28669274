//! Statistics of one replica, read by metrics, admission control and health checks.

use crate::{ExecutorFailure, KvGroupHitStats};
use protocol::{Replica, StepId, StepTiming};

/// Statistics of a replica after a tick (one call of `Scheduler::tick`). Fields named `total` are monotonic.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SchedulerStats {
    /// Replica of the snapshot.
    pub replica: Replica,
    /// Whether the executors are ready.
    pub executors_ready: bool,
    /// Id of the last step sent.
    pub step: StepId,
    /// Number of steps that were sent to the executors and whose output has not been applied.
    pub steps_in_flight: u32,
    /// Number of running requests; each has a sequence slot.
    pub running: u32,
    /// Number of waiting requests.
    pub waiting: u32,
    /// Known tokens of the waiting requests.
    pub waiting_tokens: u64,
    /// Submission time of the head of the waiting queue, in milliseconds, as passed to `Scheduler::tick`;
    /// `None` = empty queue.
    pub head_submitted_ms: Option<u64>,
    /// KV blocks by state.
    pub blocks: BlockStats,
    /// State slots of a state group by use; all state groups have equal numbers of slots. 0 without state groups.
    pub state_slots: StateSlotStats,
    /// Number of rows of the last step sent.
    pub last_step_rows: u32,
    /// Number of tokens forwarded by the last step sent.
    pub last_step_tokens: u32,
    /// Timing that the executor reported in the last applied output.
    pub timing: StepTiming,
    /// Number of steps whose output was applied.
    pub steps_total: u64,
    /// Prompt tokens of requests admitted for the first time.
    pub prompt_tokens_total: u64,
    /// Prompt tokens of first admissions that were prefix hits.
    pub prompt_tokens_cached_total: u64,
    /// Number of generated tokens.
    pub generated_tokens_total: u64,
    /// Statistics of speculative decoding.
    pub drafts_total: SpecDecodeStats,
    /// Number of preemptions.
    pub preemptions_total: u64,
    /// Number of running requests that were requeued because of an executor failure, by kind of failure.
    pub requests_recovered_total: ExecutorFailureCounts,
    /// Number of tokens that had to be recomputed after a requeue, because the prefix cache no longer had
    /// them, by requeue reason.
    pub tokens_recomputed_total: RecomputedTokenCounts,
    /// Tokens looked up in the prefix cache at admission.
    pub prefix_queries_total: u64,
    /// Tokens of prefix hits at admission.
    pub prefix_hits_total: u64,
    /// Tokens of prefix hits that each KV group offered, gave and cut; empty if all layers keep all positions in one
    /// group.
    pub kv_group_hits_total: Vec<KvGroupHitStats>,
    /// Number of row results that were dropped because their request had finished or been preempted.
    pub rows_dropped_total: u64,
    /// Number of step outputs that were dropped because they have an old epoch, are repeated or are out of
    /// order.
    pub outputs_dropped_total: u64,
}

/// Maximum number of draft tokens per row.
pub const DRAFT_TOKENS_MAX: usize = 16;

/// Counters of verified draft tokens. Draft tokens of failed rows and of finished requests are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpecDecodeStats {
    /// Number of rows with verified draft tokens.
    pub draft_rows: u64,
    /// Number of verified draft tokens, accepted or rejected.
    pub draft_tokens: u64,
    /// Number of accepted draft tokens by position in the row.
    pub accepted_per_position: [u64; DRAFT_TOKENS_MAX],
}

impl SpecDecodeStats {
    pub(crate) fn add(&mut self, drafted: u8, accepted: u8) {
        self.draft_rows += u64::from(drafted > 0);
        self.draft_tokens += u64::from(drafted);
        for count in &mut self.accepted_per_position[..usize::from(accepted)] {
            *count += 1;
        }
    }
}

/// A count per kind of executor failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExecutorFailureCounts {
    /// Count for executors whose process or thread ended or whose link closed.
    pub exited: u64,
    /// Count for executors that sent no heartbeat within the heartbeat timeout.
    pub heartbeat_timeout: u64,
    /// Count for executors with a step that exceeded its deadline.
    pub step_timeout: u64,
    /// Count for executors that reported a failure.
    pub reported_fault: u64,
}

impl ExecutorFailureCounts {
    pub(crate) fn add(&mut self, failure: ExecutorFailure, count: u64) {
        let total = match failure {
            ExecutorFailure::Exited => &mut self.exited,
            ExecutorFailure::HeartbeatTimeout => &mut self.heartbeat_timeout,
            ExecutorFailure::StepTimeout => &mut self.step_timeout,
            ExecutorFailure::ReportedFault => &mut self.reported_fault,
        };
        *total += count;
    }
}

/// Reason why a running request was requeued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequeueReason {
    /// Other requests needed its blocks.
    Preemption,
    /// The prefix cache was cleared with `requeue_running`.
    Reset,
    /// Its executors failed.
    ExecutorFailure(ExecutorFailure),
}

/// Recomputed tokens by requeue reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecomputedTokenCounts {
    /// Tokens recomputed after a preemption.
    pub preemption: u64,
    /// Tokens recomputed after the prefix cache was cleared.
    pub reset: u64,
    /// Tokens recomputed after an executor failure.
    pub executor_failure: ExecutorFailureCounts,
}

impl RecomputedTokenCounts {
    pub(crate) fn add(&mut self, reason: RequeueReason, tokens: u32) {
        let tokens = u64::from(tokens);
        match reason {
            RequeueReason::Preemption => self.preemption += tokens,
            RequeueReason::Reset => self.reset += tokens,
            RequeueReason::ExecutorFailure(failure) => self.executor_failure.add(failure, tokens),
        }
    }
}

/// KV blocks by state; free + cached + in use = pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockStats {
    /// Blocks in the pool.
    pub pool: u32,
    /// Free blocks: unreferenced and not cached.
    pub free: u32,
    /// Cached blocks: unreferenced and in the prefix index.
    pub cached: u32,
    /// Blocks referenced by block tables.
    pub in_use: u32,
    /// Number of free and cached blocks that are reserved for non-preemptible requests.
    pub reserved: u32,
}

/// State slots of a replica in one state group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateSlotStats {
    /// Slots in the pool.
    pub pool: u32,
    /// Unreferenced slots without a checkpoint.
    pub free: u32,
    /// Unreferenced slots with a checkpoint.
    pub checkpoints: u32,
    /// Slots that requests reference.
    pub in_use: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_with_drafts_are_counted() {
        let mut stats = SpecDecodeStats::default();
        for (drafted, accepted) in [(0, 0), (3, 2), (1, 0)] {
            stats.add(drafted, accepted);
        }
        assert_eq!((stats.draft_rows, stats.draft_tokens), (2, 4));
        assert_eq!(stats.accepted_per_position[..3], [1, 1, 0]);
    }
}
