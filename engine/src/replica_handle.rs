//! Handle of the scheduler thread to one replica: command queue, steps in flight and stragglers (ranks that
//! are late with a step).

use super::executors::ExecutorLink;
use protocol::{Batch, ExecutorCommand, ProfilerStatus, Rank, StepId};
use scheduler::{
    ExecutorFailure, StepCosts, StepDeadlineEstimator, StepTimeout, StepWatchdog, StepWorkload,
};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::mpsc::SyncSender;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

/// Handle to one rank of a replica.
struct RankHandle {
    rank: Rank,
    /// Reply channels of the profiler commands that the rank has not replied to, in the order of the
    /// commands.
    profile_replies: VecDeque<UnboundedSender<ProfilerStatus>>,
}

/// Result of handling a heartbeat of a rank.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HeartbeatOutcome {
    /// Ranks that became stragglers at this heartbeat: their oldest step in flight is overdue.
    pub(super) ranks: Vec<Rank>,
    /// Description of the step timeout; `None` if the step has not timed out, so that the executors need not
    /// be marked as failed.
    pub(super) cause: Option<String>,
}

/// Handle to the executors of a replica.
pub(crate) struct ReplicaHandle {
    /// Command queue of all executors; `None` = the executors have failed and are being restarted.
    commands: Option<SyncSender<ExecutorCommand>>,
    ranks: Vec<RankHandle>,
    watchdog: StepWatchdog,
    /// Failure of the executors that the engine loop has not handled yet.
    pub(super) failure: Option<(ExecutorFailure, String)>,
}

impl ReplicaHandle {
    /// Creates the handle to the executors of a replica, which must be ready.
    pub(crate) fn new(link: &ExecutorLink, deadline: StepDeadlineEstimator) -> Self {
        let rank_handle = |rank| RankHandle { rank, profile_replies: VecDeque::new() };
        let rank_handles: Vec<RankHandle> =
            link.receivers.iter().map(|receiver| rank_handle(receiver.rank)).collect();
        let watchdog = StepWatchdog::new(rank_handles.len(), deadline);
        Self { commands: Some(link.commands.clone()), ranks: rank_handles, watchdog, failure: None }
    }

    /// Whether the executors are running.
    pub(super) fn is_up(&self) -> bool {
        self.commands.is_some()
    }

    /// Command queue of the executors; `None` = the executors have failed and are being restarted.
    pub(super) fn sender(&self) -> Option<&SyncSender<ExecutorCommand>> {
        self.commands.as_ref()
    }

    /// Attaches restarted executors: later batches are sent to their command queue.
    pub(super) fn restore(&mut self, commands: SyncSender<ExecutorCommand>) {
        self.commands = Some(commands);
    }

    /// Detaches failed executors and drops the steps in flight.
    pub(super) fn fail(&mut self) {
        self.commands = None;
        self.watchdog.on_executor_failure();
        for rank_handle in &mut self.ranks {
            rank_handle.profile_replies.clear();
        }
    }

    /// World ranks of the executors.
    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.ranks.iter().map(|rank_handle| rank_handle.rank)
    }

    /// Sends a batch to all executors. `work` is an estimate of the step's work, from which its deadline is
    /// computed. Returns the time until the deadline.
    pub(super) fn send(&mut self, batch: Batch, work: StepWorkload, now_ms: u64) -> Duration {
        let masked = batch.rows.iter().any(|row| row.masked);
        let deadline = self.watchdog.step_sent(batch.step, work, masked, now_ms);
        if let Some(commands) = &self.commands {
            // If the send fails, an executor has failed; its reader thread reports the cause.
            let _ = commands.send(ExecutorCommand::Batch(batch));
        }
        deadline
    }

    /// Commands the executors to stop.
    pub(super) fn stop(&self) {
        if let Some(commands) = &self.commands {
            // If the send fails, an executor has failed and need not be commanded to stop.
            let _ = commands.send(ExecutorCommand::Shutdown);
        }
    }

    /// Sends a profiler command to all executors. The executors reply to profiler commands in order.
    pub(super) fn profile(&mut self, on: bool, replies: &UnboundedSender<ProfilerStatus>) {
        // If the queue is full, drop the command instead of waiting; the caller's reply channel is then
        // closed.
        let sent = self
            .commands
            .as_ref()
            .map(|commands| commands.try_send(ExecutorCommand::Profile { enabled: on }));
        if let Some(Ok(())) = sent {
            for rank_handle in &mut self.ranks {
                rank_handle.profile_replies.push_back(replies.clone());
            }
        }
    }

    /// Forwards an executor's profiler status to the caller.
    pub(super) fn profiler_replied(&mut self, rank: u16, status: ProfilerStatus) {
        let rank_handle = self.ranks.get_mut(usize::from(rank));
        if let Some(replies) =
            rank_handle.and_then(|rank_handle| rank_handle.profile_replies.pop_front())
        {
            let _ = replies.send(status); // The caller may have dropped its receiver.
        }
    }

    /// Records that the scheduler thread is running. It is called several times a second, so a long interval
    /// between two calls means that the process was paused.
    pub(super) fn scheduler_awake(&mut self, now_ms: u64) {
        self.watchdog.poll(now_ms);
    }

    /// Returns the expected time until the newest step in flight completes. The time is capped so that
    /// waiting for this time cannot make the step overdue.
    pub(super) fn expected_wait(&self) -> Duration {
        self.watchdog.expected_wait()
    }

    /// Records that the output of a step was received: the step is no longer in flight, and its duration is
    /// used to correct later step deadlines.
    pub(super) fn step_completed(&mut self, step: StepId, now_ms: u64) {
        self.watchdog.step_answered(step, now_ms);
    }

    /// Returns the costs of steps, estimated from the completed steps.
    pub(super) fn step_costs(&self) -> StepCosts {
        self.watchdog.step_costs()
    }

    /// Records that a rank has finished a step.
    pub(super) fn rank_finished(&mut self, rank: u16, step: StepId) {
        self.watchdog.rank_done(rank, step);
    }

    /// Returns the start time and the time limit of the oldest step in flight, both in milliseconds; `None`
    /// if no step is in flight.
    pub(super) fn oldest_step(&self) -> Option<(u64, u64)> {
        self.watchdog.oldest_step()
    }

    /// Handles a heartbeat of a rank: checks whether the oldest step in flight is overdue.
    pub(super) fn on_heartbeat(&mut self, rank: u16, now_ms: u64) -> HeartbeatOutcome {
        let scheduler::StragglerReport { stragglers: ranks, timeout: overdue } =
            self.watchdog.on_heartbeat(rank, now_ms);
        let ranks = ranks.into_iter().map(|local_rank| self.rank(local_rank)).collect();
        HeartbeatOutcome { ranks, cause: overdue.map(|overdue| self.cause(&overdue)) }
    }

    /// Returns the ranks that have not finished the oldest step in flight.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Rank> {
        self.watchdog.stragglers().map(|local_rank| self.rank(local_rank))
    }

    /// World rank of the executor with rank `local_rank` within the replica.
    fn rank(&self, local_rank: u16) -> Rank {
        self.ranks[usize::from(local_rank)].rank
    }

    fn cause(&self, overdue: &StepTimeout) -> String {
        let StepTimeout { step, after_ms, limit_ms } = overdue;
        let mut cause = format!(
            "step {} has not completed after {after_ms} ms, its deadline is {limit_ms} ms",
            step.0
        );
        if self.ranks.len() > 1 {
            let stragglers: Vec<String> =
                self.unfinished().map(|rank| rank.0.to_string()).collect();
            // Writing to a string cannot fail.
            let _ = write!(cause, "; stragglers: rank {}", stragglers.join(", rank "));
        }
        cause
    }
}

#[cfg(test)]
mod tests {
    use super::super::executors::ExecutorReceiver;
    use super::*;
    use protocol::link::in_process_pair;
    use protocol::{Epoch, ExecutorEvent, StepCost, StepLaunchMode};

    /// Returns the handle of a replica with the ranks 4 to 6, and the receiver of its commands.
    fn handle() -> (ReplicaHandle, std::sync::mpsc::Receiver<ExecutorCommand>) {
        let (commands, sent) = std::sync::mpsc::sync_channel(8);
        let receivers = (4..7).map(|rank| {
            let (link, _) = in_process_pair::<ExecutorCommand, ExecutorEvent>(1);
            let (messages, epoch) = (Box::new(link.receiver), Epoch(1));
            ExecutorReceiver { messages, epoch, rank: Rank(rank), process: None }
        });
        let executor_link = ExecutorLink { commands, receivers: receivers.collect() };
        let fixed = Some(Duration::from_millis(70));
        (
            ReplicaHandle::new(
                &executor_link,
                StepDeadlineEstimator::new(fixed, StepCost::default()),
            ),
            sent,
        )
    }

    const WORK: StepWorkload = StepWorkload { tokens: 1, attention_pairs: 0 };

    fn batch(step: u64) -> Batch {
        let (step, dispatch) = (StepId(step), StepLaunchMode::Eager { tokens: 1 });
        Batch { step, epoch: Epoch(1), dispatch, moe_tokens: 0, draft_rows: 0, rows: Vec::new() }
    }

    #[test]
    fn overdue_step_is_reported_once_then_failed() {
        let (mut replica_handle, _sent) = handle();
        replica_handle.send(batch(1), WORK, 1_000);
        assert_eq!(replica_handle.on_heartbeat(0, 1_070), HeartbeatOutcome::default());
        replica_handle.rank_finished(1, StepId(1));
        let stragglers = HeartbeatOutcome { ranks: vec![Rank(4), Rank(6)], cause: None };
        assert_eq!(replica_handle.on_heartbeat(2, 1_071), stragglers, "heartbeat of any rank");
        assert_eq!(
            replica_handle.on_heartbeat(0, 1_072),
            HeartbeatOutcome::default(),
            "reported already"
        );
        assert_eq!(replica_handle.oldest_step(), Some((1_000, 70)));
        let cause = "step 1 has not completed after 1071 ms, its deadline is 70 ms; \
                     stragglers: rank 4, rank 6";
        assert_eq!(replica_handle.on_heartbeat(2, 2_071).cause.as_deref(), Some(cause));
    }

    #[test]
    fn steps_in_flight_are_dropped_with_their_executors() {
        let (mut replica_handle, _sent) = handle();
        replica_handle.send(batch(1), WORK, 0);
        assert_eq!(replica_handle.on_heartbeat(0, 100).ranks.len(), 3);
        replica_handle.fail();
        assert_eq!(
            (replica_handle.on_heartbeat(0, 9_000), replica_handle.is_up()),
            (HeartbeatOutcome::default(), false)
        );
    }

    #[test]
    fn every_rank_replies_to_a_profile_request() {
        let (mut replica_handle, sent) = handle();
        let (replies, mut statuses) = tokio::sync::mpsc::unbounded_channel();
        replica_handle.profile(true, &replies);
        drop(replies);
        assert_eq!(sent.try_recv(), Ok(ExecutorCommand::Profile { enabled: true }));
        for rank in [2, 0, 1] {
            replica_handle
                .profiler_replied(rank, ProfilerStatus::Started(format!("rank{rank}.json")));
            assert!(statuses.try_recv().is_ok());
        }
        assert!(statuses.is_closed() && statuses.try_recv().is_err());
        // The replica has no pending profiler command, so this status is ignored.
        replica_handle.profiler_replied(0, ProfilerStatus::Stopped(None));
    }
}
