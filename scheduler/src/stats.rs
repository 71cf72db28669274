//! Counters of one replica as data: what metrics, admission control and health read.

use crate::ExecutorFailure;
use protocol::{Replica, StepId, StepTiming};

/// Snapshot of a replica after a tick. Fields named `total` only grow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepStats {
    /// Whose.
    pub replica: Replica,
    /// Whether its executors are there.
    pub executors_ready: bool,
    /// Last step sent.
    pub step: StepId,
    /// Steps sent and not answered.
    pub steps_in_flight: u32,
    /// Requests with a seat.
    pub running: u32,
    /// Requests waiting for one.
    pub waiting: u32,
    /// Known tokens of the waiting requests.
    pub waiting_tokens: u64,
    /// When the request that is next to get a seat was submitted, as ticks tell the time; `None` = none waits.
    pub head_submitted_ms: Option<u64>,
    /// KV blocks by state.
    pub blocks: BlockStats,
    /// Rows of the last step sent.
    pub last_step_rows: u32,
    /// Tokens forwarded by the last step sent.
    pub last_step_tokens: u32,
    /// Executor time of the last output applied.
    pub timing: StepTiming,
    /// Steps answered.
    pub steps_total: u64,
    /// Prompt tokens of requests admitted for the first time.
    pub prompt_tokens_total: u64,
    /// Of these, found in the prefix cache.
    pub prompt_tokens_cached_total: u64,
    /// Tokens produced.
    pub generated_tokens_total: u64,
    /// What became of drafts.
    pub drafts_total: SpecDecodeStats,
    /// Preemptions.
    pub preemptions_total: u64,
    /// Requests that were running when their executors were lost, and were queued again.
    pub requests_recovered_total: FailureCounts,
    /// Tokens computed a second time: those that the prefix cache did not keep.
    pub tokens_recomputed_total: RecomputedTokens,
    /// Tokens looked up in the prefix cache at admission.
    pub prefix_queries_total: u64,
    /// Tokens found there.
    pub prefix_hits_total: u64,
    /// Row results dropped: their request had ended or been preempted.
    pub rows_dropped_total: u64,
    /// Outputs dropped: of a former group epoch, repeated, or out of order.
    pub outputs_dropped_total: u64,
}

/// Most drafts of one row.
pub const DRAFT_TOKENS_MAX: usize = 16;

/// Drafts that were verified. Those of rows that failed, or whose request had ended meanwhile, are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpecDecodeStats {
    /// Rows that had some.
    pub draft_rows: u64,
    /// Drafts.
    pub draft_tokens: u64,
    /// Of these, accepted, by their place in the row.
    pub accepted_per_position: [u64; DRAFT_TOKENS_MAX],
}

impl SpecDecodeStats {
    pub(crate) fn add(&mut self, drafted: u8, accepted: u8) {
        self.draft_rows += u64::from(drafted > 0);
        self.draft_tokens += u64::from(drafted);
        for place in &mut self.accepted_per_position[..usize::from(accepted)] {
            *place += 1;
        }
    }
}

/// A count for each way of losing executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FailureCounts {
    /// They ended.
    pub exited: u64,
    /// They gave no sign of life.
    pub heartbeat_timeout: u64,
    /// They did not answer a step.
    pub step_timeout: u64,
    /// They said that they failed.
    pub reported_fault: u64,
}

impl FailureCounts {
    pub(crate) fn add(&mut self, loss: ExecutorFailure, count: u64) {
        let total = match loss {
            ExecutorFailure::Exited => &mut self.exited,
            ExecutorFailure::HeartbeatTimeout => &mut self.heartbeat_timeout,
            ExecutorFailure::StepTimeout => &mut self.step_timeout,
            ExecutorFailure::ReportedFault => &mut self.reported_fault,
        };
        *total += count;
    }
}

/// Why a running request went back to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequeueReason {
    /// Its blocks were needed.
    Preemption,
    /// The prefix cache was cleared, and it was to start again.
    Reset,
    /// Its executors were lost.
    ExecutorFailure(ExecutorFailure),
}

/// Tokens by the reason for which they were computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecomputedTokens {
    /// Blocks were needed.
    pub preemption: u64,
    /// The prefix cache was cleared.
    pub reset: u64,
    /// Executors were lost.
    pub executor_failure: FailureCounts,
}

impl RecomputedTokens {
    pub(crate) fn add(&mut self, why: RequeueReason, tokens: u32) {
        let tokens = u64::from(tokens);
        match why {
            RequeueReason::Preemption => self.preemption += tokens,
            RequeueReason::Reset => self.reset += tokens,
            RequeueReason::ExecutorFailure(loss) => self.executor_failure.add(loss, tokens),
        }
    }
}

/// KV blocks by state; vacant + cached + in use = pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockStats {
    /// Blocks of the pool.
    pub pool: u32,
    /// Blocks that hold nothing.
    pub free: u32,
    /// Blocks that nobody holds and a prefix hit may find.
    pub cached: u32,
    /// Blocks held by tables.
    pub in_use: u32,
    /// Of vacant and cached: set aside for guarded requests.
    pub reserved: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_with_drafts_are_counted() {
        let mut drafted = SpecDecodeStats::default();
        for (made, accepted) in [(0, 0), (3, 2), (1, 0)] {
            drafted.add(made, accepted);
        }
        assert_eq!((drafted.draft_rows, drafted.draft_tokens), (2, 4));
        assert_eq!(drafted.accepted_per_position[..3], [1, 1, 0]);
    }
}
