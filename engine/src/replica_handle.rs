//! One replica as the scheduler's thread sees it: the road to its executors, the steps under way, and who is late.

use super::executors::ExecutorLink;
use protocol::{Batch, ExecutorCommand, ProfilerStatus, Rank, StepId};
use scheduler::{ExecutorFailure, StepDeadline, StepTimeout, StepWatchdog, StepWork};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::mpsc::SyncSender;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

/// One of the executors.
struct RankHandle {
    rank: Rank,
    /// Who waits for its answers to orders to record, in their order.
    profile_replies: VecDeque<UnboundedSender<ProfilerStatus>>,
}

/// What a sign of life brought to light.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HeartbeatOutcome {
    /// Ranks whose step has just been found to be late.
    pub(super) ranks: Vec<Rank>,
    /// Why the executors are given up, if they are.
    pub(super) cause: Option<String>,
}

/// A replica's executors and what they have been told.
pub(crate) struct ReplicaHandle {
    /// Road to all of them; `None` = they are lost, and the main thread starts others.
    commands: Option<SyncSender<ExecutorCommand>>,
    ranks: Vec<RankHandle>,
    watchdog: StepWatchdog,
    /// Why they are given up, until that has been seen to.
    pub(super) failure: Option<(ExecutorFailure, String)>,
}

impl ReplicaHandle {
    /// Executors that are ready.
    pub(crate) fn new(link: &ExecutorLink, deadline: StepDeadline) -> Self {
        let seat = |rank| RankHandle { rank, profile_replies: VecDeque::new() };
        let seats: Vec<RankHandle> = link.receivers.iter().map(|from| seat(from.rank)).collect();
        let steps = StepWatchdog::new(seats.len(), deadline);
        Self { commands: Some(link.commands.clone()), ranks: seats, watchdog: steps, failure: None }
    }

    /// Whether there are executors.
    pub(super) fn is_up(&self) -> bool {
        self.commands.is_some()
    }

    /// Road to the executors.
    pub(super) fn sender(&self) -> Option<&SyncSender<ExecutorCommand>> {
        self.commands.as_ref()
    }

    /// Others have come.
    pub(super) fn restore(&mut self, to: SyncSender<ExecutorCommand>) {
        self.commands = Some(to);
    }

    /// They are gone, with everything that was under way.
    pub(super) fn fail(&mut self) {
        self.commands = None;
        self.watchdog.on_executor_failure();
        for seat in &mut self.ranks {
            seat.profile_replies.clear();
        }
    }

    /// Places of the executors in the world.
    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.ranks.iter().map(|seat| seat.rank)
    }

    /// Sends a batch with so much to do to all of them. Returns how long its step may take.
    pub(super) fn send(&mut self, batch: Batch, work: StepWork, now_ms: u64) -> Duration {
        let masked = batch.rows.iter().any(|row| row.masked);
        let allowed = self.watchdog.step_sent(batch.step, work, masked, now_ms);
        if let Some(to) = &self.commands {
            // One that is gone says so on its own road, with the reason.
            let _ = to.send(ExecutorCommand::Batch(batch));
        }
        allowed
    }

    /// Tells them to stop.
    pub(super) fn stop(&self) {
        if let Some(to) = &self.commands {
            // One that is gone needs no order to leave.
            let _ = to.send(ExecutorCommand::Shutdown);
        }
    }

    /// Passes an order to record on; the answers come in the order of the orders.
    pub(super) fn profile(&mut self, on: bool, replies: &UnboundedSender<ProfilerStatus>) {
        // A full road is no reason to wait: the order is dropped, and its sender hears that nobody answers.
        let sent =
            self.commands.as_ref().map(|to| to.try_send(ExecutorCommand::Profile { enabled: on }));
        if let Some(Ok(())) = sent {
            for seat in &mut self.ranks {
                seat.profile_replies.push_back(replies.clone());
            }
        }
    }

    /// An executor has answered such an order.
    pub(super) fn profile_replied(&mut self, rank: u16, profiled: ProfilerStatus) {
        let seat = self.ranks.get_mut(usize::from(rank));
        if let Some(replies) = seat.and_then(|seat| seat.profile_replies.pop_front()) {
            let _ = replies.send(profiled); // Whoever asked may have gone.
        }
    }

    /// The scheduler's thread is awake, as it is several times a second.
    pub(super) fn scheduler_awake(&mut self, now_ms: u64) {
        self.watchdog.poll(now_ms);
    }

    /// Time until the newest step is answered, if all goes well; never so long that waiting for it would make it
    /// late.
    pub(super) fn expected(&self) -> Duration {
        self.watchdog.expected_wait()
    }

    /// A step was answered.
    pub(super) fn step_answered(&mut self, step: StepId, now_ms: u64) {
        self.watchdog.step_answered(step, now_ms);
    }

    /// A rank has done a step.
    pub(super) fn rank_finished(&mut self, rank: u16, step: StepId) {
        self.watchdog.rank_done(rank, step);
    }

    /// The oldest step under way: when it was sent, and how long it may take, in milliseconds.
    pub(super) fn oldest(&self) -> Option<(u64, u64)> {
        self.watchdog.oldest_step()
    }

    /// A rank gave a sign of life: is the oldest step late?
    pub(super) fn on_heartbeat(&mut self, rank: u16, now_ms: u64) -> HeartbeatOutcome {
        let scheduler::StragglerReport { stragglers: ranks, timeout: overdue } =
            self.watchdog.on_heartbeat(rank, now_ms);
        let ranks = ranks.into_iter().map(|place| self.rank(place)).collect();
        HeartbeatOutcome { ranks, cause: overdue.map(|overdue| self.cause(&overdue)) }
    }

    /// Ranks that have not done the oldest step under way.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Rank> {
        self.watchdog.stragglers().map(|place| self.rank(place))
    }

    /// Place in the world of the executor at a place in the replica.
    fn rank(&self, place: u16) -> Rank {
        self.ranks[usize::from(place)].rank
    }

    fn cause(&self, overdue: &StepTimeout) -> String {
        let StepTimeout { step, after_ms, limit_ms } = overdue;
        let mut cause = format!(
            "step {} is not answered after {after_ms} ms, its deadline is {limit_ms} ms",
            step.0
        );
        if self.ranks.len() > 1 {
            let late: Vec<String> = self.unfinished().map(|rank| rank.0.to_string()).collect();
            let _ = write!(cause, "; late: rank {}", late.join(", rank ")); // Memory takes it.
        }
        cause
    }
}

#[cfg(test)]
mod tests {
    use super::super::executors::ExecutorReceiver;
    use super::*;
    use protocol::link::in_process_pair;
    use protocol::{DispatchMode, Epoch, ExecutorEvent, StepCost};

    /// The station of ranks 4 to 6, and what they are sent.
    fn handle() -> (ReplicaHandle, std::sync::mpsc::Receiver<ExecutorCommand>) {
        let (to, sent) = std::sync::mpsc::sync_channel(8);
        let from = (4..7).map(|rank| {
            let (ours, _) = in_process_pair::<ExecutorCommand, ExecutorEvent>(1);
            let (messages, epoch) = (Box::new(ours.receiver), Epoch(1));
            ExecutorReceiver { messages, epoch, rank: Rank(rank), process: None }
        });
        let link = ExecutorLink { commands: to, receivers: from.collect() };
        let fixed = Some(Duration::from_millis(70));
        (ReplicaHandle::new(&link, StepDeadline::new(fixed, StepCost::default())), sent)
    }

    const WORK: StepWork = StepWork { tokens: 1, attention_pairs: 0 };

    fn batch(step: u64) -> Batch {
        let (step, bucket) = (StepId(step), DispatchMode::Eager { tokens: 1 });
        Batch {
            step,
            epoch: Epoch(1),
            dispatch: bucket,
            moe_tokens: 0,
            draft_rows: 0,
            rows: Vec::new(),
        }
    }

    #[test]
    fn overdue_step_is_reported_once_then_failed() {
        let (mut station, _sent) = handle();
        station.send(batch(1), WORK, 1_000);
        assert_eq!(station.on_heartbeat(0, 1_070), HeartbeatOutcome::default());
        station.rank_finished(1, StepId(1));
        let late = HeartbeatOutcome { ranks: vec![Rank(4), Rank(6)], cause: None };
        assert_eq!(station.on_heartbeat(2, 1_071), late, "by the word of any rank");
        assert_eq!(station.on_heartbeat(0, 1_072), HeartbeatOutcome::default(), "that is known");
        assert_eq!(station.oldest(), Some((1_000, 70)));
        let cause = "step 1 is not answered after 1071 ms, its deadline is 70 ms; \
                     late: rank 4, rank 6";
        assert_eq!(station.on_heartbeat(2, 2_071).cause.as_deref(), Some(cause));
    }

    #[test]
    fn steps_in_flight_are_dropped_with_their_executors() {
        let (mut station, _sent) = handle();
        station.send(batch(1), WORK, 0);
        assert_eq!(station.on_heartbeat(0, 100).ranks.len(), 3);
        station.fail();
        assert_eq!(
            (station.on_heartbeat(0, 9_000), station.is_up()),
            (HeartbeatOutcome::default(), false)
        );
    }

    #[test]
    fn every_rank_replies_to_a_profile_request() {
        let (mut station, sent) = handle();
        let (replies, mut answers) = tokio::sync::mpsc::unbounded_channel();
        station.profile(true, &replies);
        drop(replies);
        assert_eq!(sent.try_recv(), Ok(ExecutorCommand::Profile { enabled: true }));
        for rank in [2, 0, 1] {
            station.profile_replied(rank, ProfilerStatus::Started(format!("rank{rank}.json")));
            assert!(answers.try_recv().is_ok());
        }
        assert!(answers.is_closed() && answers.try_recv().is_err());
        station.profile_replied(0, ProfilerStatus::Stopped(None)); // Nobody has asked.
    }
}
