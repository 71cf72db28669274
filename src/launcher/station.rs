//! One replica as the scheduler's thread sees it: the road to its executors, the steps under way, and who is late.

use super::executor::ExecutorLink;
use super::step_deadline::{StepDeadline, Work};
use protocol::{Batch, Profiled, Rank, StepId, ToExecutor};
use scheduler::Loss;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::mpsc::SyncSender;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

/// By how much more than a quarter a step may exceed its expectation because of masks: the least time they are waited for, and
/// sampling behind that.
const MASKED_EXCESS: Duration = Duration::from_millis(1);

/// A step that has not been answered.
struct Sent {
    step: StepId,
    at_ms: u64,
    work: Work,
    /// Some of its rows wait for masks.
    masked: bool,
}

/// Signs of life come every second; those that a pause of this process has piled up come at once.
const LOOKS_APART_MS: u64 = 500;

/// One of the executors.
struct Seat {
    rank: Rank,
    /// The last step it has done.
    done: StepId,
    /// The step that was late at its last sign of life, and when that was first seen.
    late: Option<(StepId, u64)>,
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
    deadline: StepDeadline,
    /// Steps that have not been answered, oldest first.
    sent: VecDeque<Sent>,
    /// Why they are given up, until that has been seen to.
    pub(super) lost: Option<(Loss, String)>,
}

impl Station {
    /// Executors that are ready.
    pub fn new(link: &ExecutorLink, deadline: StepDeadline) -> Self {
        let seat = |rank| Seat { rank, done: StepId(0), late: None, profiling: VecDeque::new() };
        let seats = link.from.iter().map(|from| seat(from.rank)).collect();
        Self { to: Some(link.to.clone()), seats, deadline, sent: VecDeque::new(), lost: None }
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
        self.sent.clear();
        for seat in &mut self.seats {
            seat.late = None;
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
        self.sent.push_back(Sent { step: batch.step, at_ms: now_ms, work, masked });
        if let Some(to) = &self.to {
            // One that is gone says so on its own road, with the reason.
            let _ = to.send(ToExecutor::Batch(batch));
        }
        self.deadline.of(work)
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

    /// Time until the newest step is answered, if all goes well; never so long that waiting for it would make it
    /// late.
    pub(super) fn expected(&self) -> Duration {
        let expected = self.sent.iter().map(|step| self.deadline.expected(step.work)).sum();
        let newest =
            self.sent.back().map_or(Duration::ZERO, |step| self.deadline.of(step.work) / 2);
        newest.min(expected)
    }

    /// A step was answered: learns from the time it took.
    pub(super) fn answered(&mut self, step: StepId, now_ms: u64) {
        self.done(0, step);
        while let Some(first) = self.sent.pop_front_if(|sent| sent.step <= step) {
            let took = Duration::from_millis(now_ms.saturating_sub(first.at_ms));
            let expected = self.deadline.expected(first.work);
            // One that waited for masks is no reason for the next one to wait longer. None waits for long, though: what
            // took much longer than expected is slow itself.
            let waited = first.masked && took < expected + expected / 4 + MASKED_EXCESS;
            let most = if waited { expected } else { took };
            self.deadline.note(first.work, took.min(most));
            // The device gets to a step only after its predecessor.
            if let Some(next) = self.sent.front_mut() {
                next.at_ms = next.at_ms.max(now_ms);
            }
        }
    }

    /// A rank has done a step.
    pub(super) fn done(&mut self, rank: u16, step: StepId) {
        if let Some(seat) = self.seats.get_mut(usize::from(rank)) {
            seat.done = seat.done.max(step);
        }
    }

    /// The oldest step under way: when it was sent, and how long it may take, in milliseconds.
    pub(super) fn oldest(&self) -> Option<(u64, u64)> {
        let first = self.sent.front()?;
        Some((first.at_ms, self.deadline.of(first.work).as_millis() as u64))
    }

    /// A rank gave a sign of life. A step is lost only if it was late at two signs of life of a rank that did not come
    /// at once: had this process been paused, so has the step's way to the rank or its answer, and both arrive in between.
    pub(super) fn beat(&mut self, rank: u16, now_ms: u64) -> Lateness {
        let Some(seat) = self.seats.get_mut(usize::from(rank)) else { return Lateness::default() };
        let overdue = self.sent.front().filter(|first| {
            let limit_ms = self.deadline.of(first.work).as_millis();
            u128::from(now_ms.saturating_sub(first.at_ms)) > limit_ms
        });
        let Some(first) = overdue else {
            seat.late = None;
            return Lateness::default();
        };
        if let Some((step, since_ms)) = seat.late
            && step == first.step
        {
            let apart = now_ms.saturating_sub(since_ms) >= LOOKS_APART_MS;
            let cause = apart.then(|| self.cause(first, now_ms));
            return Lateness { ranks: Vec::new(), cause };
        }
        seat.late = Some((first.step, now_ms));
        // Told once, with the first sign of life that finds it late.
        let is_late = |seat: &&Seat| seat.late.is_some_and(|(step, _)| step == first.step);
        let found = self.seats.iter().filter(is_late).count() == 1;
        let ranks = if found { self.behind(first.step).collect() } else { Vec::new() };
        Lateness { ranks, cause: None }
    }

    /// Ranks that have not done the oldest step under way.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Rank> {
        self.sent.front().into_iter().flat_map(|first| self.behind(first.step))
    }

    /// Ranks that have not done a step; all, if each waits for the others.
    fn behind(&self, step: StepId) -> impl Iterator<Item = Rank> {
        self.seats.iter().filter(move |seat| seat.done < step).map(|seat| seat.rank)
    }

    fn cause(&self, first: &Sent, now_ms: u64) -> String {
        let (step, after_ms) = (first.step.0, now_ms - first.at_ms);
        let limit_ms = self.deadline.of(first.work).as_millis();
        let mut cause = format!(
            "step {step} is not answered after {after_ms} ms, its deadline is {limit_ms} ms"
        );
        if self.seats.len() > 1 {
            let late: Vec<String> =
                self.behind(first.step).map(|rank| rank.0.to_string()).collect();
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
    use protocol::{Bucket, Epoch, FromExecutor, Input, Pace, RequestId, Row, Seat};

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

    const PACE: Pace = Pace { fixed_ns: 8_000_000, per_token_ns: 20_000 };
    const WORK: Work = Work { tokens: 1, pairs: 0 };

    fn batch(step: u64) -> Batch {
        let (step, bucket) = (StepId(step), Bucket::Eager { tokens: 1 });
        Batch { step, epoch: Epoch(1), bucket, moe_tokens: 0, draft_rows: 0, rows: Vec::new() }
    }

    fn row(masked: bool) -> Row {
        Row {
            request: RequestId(1),
            epoch: 1,
            seat: Seat(0),
            start: 0,
            len: 1,
            drafts: 0,
            samples: true,
            masked,
            input: Input::Tokens(vec![1].into()),
            tables: Vec::new().into(),
            next: None,
            init: None,
        }
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
    fn signs_of_life_that_a_pause_has_piled_up_are_one_look() {
        let (mut station, _sent) = station();
        station.send(batch(1), WORK, 0);
        // This process stood still for eight seconds; the batch never left it, the executor went on beating.
        for _ in 0..8 {
            assert_eq!(station.beat(0, 8_000).cause, None);
        }
        assert_eq!(station.beat(0, 8_499).cause, None);
        assert!(station.beat(0, 9_000).cause.is_some(), "but then it is lost");
    }

    #[test]
    fn an_answer_in_between_saves_it() {
        let (mut station, _sent) = station();
        station.send(batch(1), WORK, 0);
        station.send(batch(2), WORK, 0);
        assert_eq!(station.beat(0, 100).ranks.len(), 3);
        station.answered(StepId(1), 100);
        assert_eq!(station.beat(0, 150), Lateness::default(), "step 2 began with the answer");
        assert_eq!(station.beat(0, 171).cause, None, "late for the first time");
        station.lose();
        assert_eq!((station.beat(0, 9_000), station.is_up()), (Lateness::default(), false));
    }

    #[test]
    fn a_step_that_waited_for_masks_does_not_make_the_next_one_wait_longer() {
        let expected_after = |masked: bool, took_ms: u64| {
            let (mut station, _sent) = station();
            station.deadline = StepDeadline::new(None, PACE);
            let mut first = batch(1);
            first.rows = vec![row(masked)];
            station.send(first, WORK, 0);
            station.answered(StepId(1), took_ms);
            station.send(batch(2), WORK, took_ms);
            station.expected()
        };
        let told = Duration::from_nanos(PACE.fixed_ns + PACE.per_token_ns);
        assert!(expected_after(false, 10) > told);
        assert_eq!(expected_after(true, 10), told, "as the pace was said to be");
        assert_eq!(expected_after(true, 14), expected_after(false, 14), "slow by itself");
        assert!(expected_after(true, 4) < told);
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
