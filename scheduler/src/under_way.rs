//! The steps of a replica that its executors have not answered, and who is late with them.

use crate::step_deadline::{StepDeadline, Work};
use kvcache::{Bug, Planted};
use protocol::StepId;
use std::collections::VecDeque;
use std::time::Duration;

/// By how much more than a quarter a step may exceed its expectation because of masks: the least time they are waited for, and
/// sampling behind that.
const MASKED_EXCESS: Duration = Duration::from_millis(1);

/// Signs of life come every second; those that a pause of this process has piled up come at once.
const LOOKS_APART_MS: u64 = 500;

/// Whoever drives the engine looks after its steps several times a second: where so much time has passed, it was paused.
const PAUSE_MS: u64 = 1_000;
/// So much of a pause is a step's time all the same: where every turn is slow, what hangs must be found in the end.
const TURN_MS: u64 = 250;

/// A step that has not been answered.
#[derive(Debug)]
struct Sent {
    step: StepId,
    /// When it could begin, as far as this process knows.
    at_ms: u64,
    /// Whether this process was paused meanwhile: how long the step took is not known.
    paused: bool,
    work: Work,
    /// Some of its rows wait for masks.
    masked: bool,
}

/// One of the executors.
#[derive(Debug, Default)]
struct Seat {
    /// The last step it has done.
    done: StepId,
    /// The step that was late at its last sign of life, and when that was first seen.
    late: Option<(StepId, u64)>,
}

/// What a sign of life brought to light.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Lateness {
    /// Ranks whose step has just been found to be late, by their place in the replica.
    pub ranks: Vec<u16>,
    /// Why the executors are given up, if they are.
    pub overdue: Option<Overdue>,
}

/// A step that nobody waits for any more.
#[derive(Debug, PartialEq, Eq)]
pub struct Overdue {
    /// Which.
    pub step: StepId,
    /// Time since it could begin.
    pub after_ms: u64,
    /// Time it could have taken.
    pub limit_ms: u64,
}

/// Steps under way, oldest first, and what is known of each rank.
#[derive(Debug)]
pub struct UnderWay {
    seats: Vec<Seat>,
    deadline: StepDeadline,
    sent: VecDeque<Sent>,
    /// When somebody last looked after them.
    awake_ms: u64,
    /// Bug in force, for simulations of a build with the feature `planted`.
    pub planted: Planted,
}

impl UnderWay {
    /// A replica of so many ranks to which nothing has been sent.
    pub fn new(ranks: usize, deadline: StepDeadline) -> Self {
        let seats = (0..ranks).map(|_| Seat::default()).collect();
        Self { seats, deadline, sent: VecDeque::new(), awake_ms: 0, planted: Planted::default() }
    }

    /// Somebody looks after them. While nobody did for long, a step may have lain in this process, on its way to the executors, who
    /// then still need all the time that it may take: a pause is nobody's time.
    pub fn awake(&mut self, now_ms: u64) {
        let pause_ms = now_ms.saturating_sub(self.awake_ms);
        self.awake_ms = now_ms;
        if pause_ms >= PAUSE_MS && !self.planted.has(Bug::PauseIsStepTime) {
            for sent in &mut self.sent {
                sent.at_ms = now_ms.min(sent.at_ms + pause_ms - TURN_MS);
                sent.paused = true;
            }
        }
    }

    /// The executors are gone, with everything that was under way.
    pub fn lose(&mut self) {
        self.sent.clear();
        for seat in &mut self.seats {
            seat.late = None;
        }
    }

    /// A step with so much to do is sent to all of them, `masked` if some of its rows wait for masks. Returns how long it
    /// may take.
    pub fn send(&mut self, step: StepId, work: Work, masked: bool, now_ms: u64) -> Duration {
        self.sent.push_back(Sent { step, at_ms: now_ms, paused: false, work, masked });
        self.deadline.of(work)
    }

    /// Time until the newest step is answered, if all goes well; never so long that waiting for it would make it
    /// late.
    pub fn expected(&self) -> Duration {
        let expected = self.sent.iter().map(|step| self.deadline.expected(step.work)).sum();
        let newest =
            self.sent.back().map_or(Duration::ZERO, |step| self.deadline.of(step.work) / 2);
        newest.min(expected)
    }

    /// A step was answered: learns from the time it took.
    pub fn answered(&mut self, step: StepId, now_ms: u64) {
        self.done(0, step);
        while let Some(first) = self.sent.pop_front_if(|sent| sent.step <= step) {
            let took = Duration::from_millis(now_ms.saturating_sub(first.at_ms));
            let expected = self.deadline.expected(first.work);
            // One that waited for masks is no reason for the next one to wait longer. None waits for long, though: what
            // took much longer than expected is slow itself.
            let waited = first.masked && took < expected + expected / 4 + MASKED_EXCESS;
            let most = if waited { expected } else { took };
            if !first.paused {
                self.deadline.note(first.work, took.min(most));
            }
            // The device gets to a step only after its predecessor.
            if let Some(next) = self.sent.front_mut() {
                next.at_ms = next.at_ms.max(now_ms);
            }
        }
    }

    /// A rank has done a step.
    pub fn done(&mut self, rank: u16, step: StepId) {
        if let Some(seat) = self.seats.get_mut(usize::from(rank)) {
            seat.done = seat.done.max(step);
        }
    }

    /// The oldest step under way: when it was sent, and how long it may take, in milliseconds.
    pub fn oldest(&self) -> Option<(u64, u64)> {
        let first = self.sent.front()?;
        Some((first.at_ms, self.deadline.of(first.work).as_millis() as u64))
    }

    /// A rank gave a sign of life. A step is lost only if it was late at two signs of life of a rank that did not come
    /// at once: had whoever reads its link been paused, its answer may lie behind the first.
    pub fn beat(&mut self, rank: u16, now_ms: u64) -> Lateness {
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
            let piled = self.planted.has(Bug::PiledBeatsAreLooks);
            let apart = piled || now_ms.saturating_sub(since_ms) >= LOOKS_APART_MS;
            return Lateness {
                ranks: Vec::new(),
                overdue: apart.then(|| self.overdue(first, now_ms)),
            };
        }
        seat.late = Some((first.step, now_ms));
        // Told once, with the first sign of life that finds it late.
        let is_late = |seat: &&Seat| seat.late.is_some_and(|(step, _)| step == first.step);
        let found = self.seats.iter().filter(is_late).count() == 1;
        let ranks = if found { self.behind(first.step).collect() } else { Vec::new() };
        Lateness { ranks, overdue: None }
    }

    /// Ranks that have not done the oldest step under way.
    pub fn unfinished(&self) -> impl Iterator<Item = u16> {
        self.sent.front().into_iter().flat_map(|first| self.behind(first.step))
    }

    /// Ranks that have not done a step; all, if each waits for the others.
    fn behind(&self, step: StepId) -> impl Iterator<Item = u16> {
        let seats = (0..).zip(&self.seats);
        seats.filter(move |(_, seat)| seat.done < step).map(|(rank, _)| rank)
    }

    fn overdue(&self, first: &Sent, now_ms: u64) -> Overdue {
        let limit_ms = self.deadline.of(first.work).as_millis() as u64;
        Overdue { step: first.step, after_ms: now_ms - first.at_ms, limit_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::Pace;

    const PACE: Pace = Pace { fixed_ns: 8_000_000, per_token_ns: 20_000 };
    const WORK: Work = Work { tokens: 1, pairs: 0 };

    /// Three ranks whose steps may take 70 ms.
    fn three() -> UnderWay {
        let fixed = Some(Duration::from_millis(70));
        UnderWay::new(3, StepDeadline::new(fixed, Pace::default()))
    }

    #[test]
    fn a_late_step_is_lost_at_the_second_look_of_a_rank() {
        let mut steps = three();
        steps.send(StepId(1), WORK, false, 1_000);
        assert_eq!(steps.beat(0, 1_070), Lateness::default());
        steps.done(1, StepId(1));
        let late = Lateness { ranks: vec![0, 2], overdue: None };
        assert_eq!(steps.beat(2, 1_071), late, "by the word of any rank");
        assert_eq!(steps.beat(0, 1_072), Lateness::default(), "that is known");
        let overdue = Some(Overdue { step: StepId(1), after_ms: 571, limit_ms: 70 });
        assert_eq!(steps.beat(2, 1_570).overdue, None);
        assert_eq!(steps.beat(2, 1_571).overdue, overdue);
        assert_eq!(steps.unfinished().collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn signs_of_life_that_a_pause_has_piled_up_are_one_look() {
        let mut steps = three();
        steps.send(StepId(1), WORK, false, 0);
        // Whoever reads the link stood still for eight seconds; the executor went on beating.
        for _ in 0..8 {
            assert_eq!(steps.beat(0, 8_000).overdue, None);
        }
        assert_eq!(steps.beat(0, 8_499).overdue, None);
        assert!(steps.beat(0, 9_000).overdue.is_some(), "but then it is lost");
    }

    #[test]
    fn a_step_that_a_pause_has_held_up_has_all_its_time_behind_it() {
        let mut steps = three();
        steps.awake(100);
        steps.send(StepId(1), WORK, false, 100);
        steps.send(StepId(2), WORK, false, 100);
        steps.awake(1_099);
        assert_eq!(steps.oldest(), Some((100, 70)), "that was no pause");
        steps.awake(9_099);
        assert_eq!(
            steps.oldest(),
            Some((7_850, 70)),
            "a second of its time, and a turn, were no pause"
        );
        steps.send(StepId(3), WORK, false, 9_099);
        steps.answered(StepId(2), 9_099);
        steps.awake(17_099);
        assert_eq!(steps.oldest(), Some((16_849, 70)), "it may have left just now");
        assert_eq!(steps.beat(0, 17_099).ranks, [0, 1, 2]);
        assert!(steps.beat(0, 17_599).overdue.is_some(), "but then it is lost");
    }

    #[test]
    fn a_hang_is_found_even_where_every_turn_is_slow() {
        let fixed = Some(Duration::from_secs(5));
        let mut steps = UnderWay::new(1, StepDeadline::new(fixed, Pace::default()));
        steps.send(StepId(1), WORK, false, 0);
        let lost = (1..100).map(|turn| turn * 1_500).find(|&now_ms| {
            steps.awake(now_ms);
            steps.beat(0, now_ms).overdue.is_some()
        });
        assert_eq!(lost, Some(33_000), "twenty turns of a quarter of a second, and a second look");
    }

    #[test]
    fn a_pause_teaches_nothing() {
        let mut steps = UnderWay::new(1, StepDeadline::new(None, PACE));
        steps.send(StepId(1), WORK, false, 0);
        let told = steps.expected();
        steps.awake(9_000);
        steps.answered(StepId(1), 9_000);
        steps.send(StepId(2), WORK, false, 9_000);
        assert_eq!(steps.expected(), told);
    }

    #[test]
    fn an_answer_in_between_saves_it() {
        let mut steps = three();
        steps.send(StepId(1), WORK, false, 0);
        steps.send(StepId(2), WORK, false, 0);
        assert_eq!(steps.beat(0, 100).ranks.len(), 3);
        steps.answered(StepId(1), 100);
        assert_eq!(steps.beat(0, 150), Lateness::default(), "step 2 began with the answer");
        assert_eq!(steps.beat(0, 171).overdue, None, "late for the first time");
        steps.lose();
        assert_eq!((steps.beat(0, 9_000), steps.oldest()), (Lateness::default(), None));
    }

    #[test]
    fn a_step_that_waited_for_masks_does_not_make_the_next_one_wait_longer() {
        let expected_after = |masked: bool, took_ms: u64| {
            let mut steps = UnderWay::new(1, StepDeadline::new(None, PACE));
            steps.send(StepId(1), WORK, masked, 0);
            steps.answered(StepId(1), took_ms);
            steps.send(StepId(2), WORK, masked, took_ms);
            steps.expected()
        };
        let told = Duration::from_nanos(PACE.fixed_ns + PACE.per_token_ns);
        assert!(expected_after(false, 10) > told);
        assert_eq!(expected_after(true, 10), told, "as the pace was said to be");
        assert_eq!(expected_after(true, 14), expected_after(false, 14), "slow by itself");
        assert!(expected_after(true, 4) < told);
    }
}
