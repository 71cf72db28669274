//! One replica as the scheduler's thread sees it: the road to its executors, the steps under way, and who is late.

use super::executor::ExecutorLink;
use protocol::{Batch, Profiled, Rank, StepId, ToExecutor};
use scheduler::{Loss, Overdue, StepDeadline, UnderWay, Work};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::mpsc::SyncSender;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

/// One of the executors.
struct Seat {
    rank: Rank,
    /// Who waits for its answers to orders to record, in their order.
    profiling: VecDeque<UnboundedSender<Profiled>>,
}

/// What a sign of life brought to light.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Lateness {
    /// Ranks whose step has just been found to be late.
    pub(super) ranks: Vec<Rank>,
    /// Why the executors are given up, if they are.
    pub(super) cause: Option<String>,
}

/// A replica's executors and what they have been told.
pub struct Station {
    /// Road to all of them; `None` = they are lost, and the main thread starts others.
    to: Option<SyncSender<ToExecutor>>,
    seats: Vec<Seat>,
    steps: UnderWay,
    /// Why they are given up, until that has been seen to.
    pub(super) lost: Option<(Loss, String)>,
}

impl Station {
    /// Executors that are ready.
    pub fn new(link: &ExecutorLink, deadline: StepDeadline) -> Self {
        let seat = |rank| Seat { rank, profiling: VecDeque::new() };
        let seats: Vec<Seat> = link.from.iter().map(|from| seat(from.rank)).collect();
        let steps = UnderWay::new(seats.len(), deadline);
        Self { to: Some(link.to.clone()), seats, steps, lost: None }
    }

    /// Whether there are executors.
    pub(super) fn is_up(&self) -> bool {
        self.to.is_some()
    }

    /// Road to the executors.
    pub(super) fn road(&self) -> Option<&SyncSender<ToExecutor>> {
        self.to.as_ref()
    }

    /// Others have come.
    pub(super) fn resume(&mut self, to: SyncSender<ToExecutor>) {
        self.to = Some(to);
    }

    /// They are gone, with everything that was under way.
    pub(super) fn lose(&mut self) {
        self.to = None;
        self.steps.lose();
        for seat in &mut self.seats {
            seat.profiling.clear();
        }
    }

    /// Places of the executors in the world.
    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.seats.iter().map(|seat| seat.rank)
    }

    /// Sends a batch with so much to do to all of them. Returns how long its step may take.
    pub(super) fn send(&mut self, batch: Batch, work: Work, now_ms: u64) -> Duration {
        let masked = batch.rows.iter().any(|row| row.masked);
        let allowed = self.steps.send(batch.step, work, masked, now_ms);
        if let Some(to) = &self.to {
            // One that is gone says so on its own road, with the reason.
            let _ = to.send(ToExecutor::Batch(batch));
        }
        allowed
    }

    /// Tells them to stop.
    pub(super) fn stop(&self) {
        if let Some(to) = &self.to {
            // One that is gone needs no order to leave.
            let _ = to.send(ToExecutor::Shutdown);
        }
    }

    /// Passes an order to record on; the answers come in the order of the orders.
    pub(super) fn profile(&mut self, on: bool, replies: &UnboundedSender<Profiled>) {
        // A full road is no reason to wait: the order is dropped, and its sender hears that nobody answers.
        let sent = self.to.as_ref().map(|to| to.try_send(ToExecutor::Profile { on }));
        if let Some(Ok(())) = sent {
            for seat in &mut self.seats {
                seat.profiling.push_back(replies.clone());
            }
        }
    }

    /// An executor has answered such an order.
    pub(super) fn profiled(&mut self, rank: u16, profiled: Profiled) {
        let seat = self.seats.get_mut(usize::from(rank));
        if let Some(replies) = seat.and_then(|seat| seat.profiling.pop_front()) {
            let _ = replies.send(profiled); // Whoever asked may have gone.
        }
    }

    /// The scheduler's thread is awake, as it is several times a second.
    pub(super) fn awake(&mut self, now_ms: u64) {
        self.steps.awake(now_ms);
    }

    /// Time until the newest step is answered, if all goes well; never so long that waiting for it would make it
    /// late.
    pub(super) fn expected(&self) -> Duration {
        self.steps.expected()
    }

    /// A step was answered.
    pub(super) fn answered(&mut self, step: StepId, now_ms: u64) {
        self.steps.answered(step, now_ms);
    }

    /// A rank has done a step.
    pub(super) fn done(&mut self, rank: u16, step: StepId) {
        self.steps.done(rank, step);
    }

    /// The oldest step under way: when it was sent, and how long it may take, in milliseconds.
    pub(super) fn oldest(&self) -> Option<(u64, u64)> {
        self.steps.oldest()
    }

    /// A rank gave a sign of life: is the oldest step late?
    pub(super) fn beat(&mut self, rank: u16, now_ms: u64) -> Lateness {
        let scheduler::Lateness { ranks, overdue } = self.steps.beat(rank, now_ms);
        let ranks = ranks.into_iter().map(|place| self.rank(place)).collect();
        Lateness { ranks, cause: overdue.map(|overdue| self.cause(&overdue)) }
    }

    /// Ranks that have not done the oldest step under way.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Rank> {
        self.steps.unfinished().map(|place| self.rank(place))
    }

    /// Place in the world of the executor at a place in the replica.
    fn rank(&self, place: u16) -> Rank {
        self.seats[usize::from(place)].rank
    }

    fn cause(&self, overdue: &Overdue) -> String {
        let Overdue { step, after_ms, limit_ms } = overdue;
        let mut cause = format!(
            "step {} is not answered after {after_ms} ms, its deadline is {limit_ms} ms",
            step.0
        );
        if self.seats.len() > 1 {
            let late: Vec<String> = self.unfinished().map(|rank| rank.0.to_string()).collect();
            let _ = write!(cause, "; late: rank {}", late.join(", rank ")); // Memory takes it.
        }
        cause
    }
}

#[cfg(test)]
mod tests {
    use super::super::executor::Incoming;
    use super::*;
    use protocol::link::pair;
    use protocol::{Bucket, Epoch, FromExecutor, Pace};

    /// The station of ranks 4 to 6, and what they are sent.
    fn station() -> (Station, std::sync::mpsc::Receiver<ToExecutor>) {
        let (to, sent) = std::sync::mpsc::sync_channel(8);
        let from = (4..7).map(|rank| {
            let (ours, _) = pair::<ToExecutor, FromExecutor>(1);
            let (messages, epoch) = (Box::new(ours.receiver), Epoch(1));
            Incoming { messages, epoch, rank: Rank(rank), process: None }
        });
        let link = ExecutorLink { to, from: from.collect() };
        let fixed = Some(Duration::from_millis(70));
        (Station::new(&link, StepDeadline::new(fixed, Pace::default())), sent)
    }

    const WORK: Work = Work { tokens: 1, pairs: 0 };

    fn batch(step: u64) -> Batch {
        let (step, bucket) = (StepId(step), Bucket::Eager { tokens: 1 });
        Batch { step, epoch: Epoch(1), bucket, moe_tokens: 0, draft_rows: 0, rows: Vec::new() }
    }

    #[test]
    fn a_late_step_is_told_once_and_lost_at_the_second_look() {
        let (mut station, _sent) = station();
        station.send(batch(1), WORK, 1_000);
        assert_eq!(station.beat(0, 1_070), Lateness::default());
        station.done(1, StepId(1));
        let late = Lateness { ranks: vec![Rank(4), Rank(6)], cause: None };
        assert_eq!(station.beat(2, 1_071), late, "by the word of any rank");
        assert_eq!(station.beat(0, 1_072), Lateness::default(), "that is known");
        assert_eq!(station.oldest(), Some((1_000, 70)));
        let cause = "step 1 is not answered after 1071 ms, its deadline is 70 ms; \
                     late: rank 4, rank 6";
        assert_eq!(station.beat(2, 2_071).cause.as_deref(), Some(cause));
    }

    #[test]
    fn what_was_under_way_is_gone_with_its_executors() {
        let (mut station, _sent) = station();
        station.send(batch(1), WORK, 0);
        assert_eq!(station.beat(0, 100).ranks.len(), 3);
        station.lose();
        assert_eq!((station.beat(0, 9_000), station.is_up()), (Lateness::default(), false));
    }

    #[test]
    fn every_rank_answers_an_order_to_record() {
        let (mut station, sent) = station();
        let (replies, mut answers) = tokio::sync::mpsc::unbounded_channel();
        station.profile(true, &replies);
        drop(replies);
        assert_eq!(sent.try_recv(), Ok(ToExecutor::Profile { on: true }));
        for rank in [2, 0, 1] {
            station.profiled(rank, Profiled::Started(format!("rank{rank}.json")));
            assert!(answers.try_recv().is_ok());
        }
        assert!(answers.is_closed() && answers.try_recv().is_err());
        station.profiled(0, Profiled::Stopped(None)); // Nobody has asked.
    }
}
