//! Watches the steps in flight of a replica: their deadlines, and the ranks that have not finished them.

use crate::StepCosts;
use crate::step_deadline::{StepDeadlineEstimator, StepWorkload};
use protocol::StepId;
use std::collections::VecDeque;
use std::time::Duration;

/// The wait for grammar bitmasks is taken as the cause of a delay if the step time exceeds 5/4 of the
/// expected time by less than this tolerance. The tolerance covers the minimum wait for bitmasks (2 ms with
/// draft tokens) and the sampling after it.
const MASK_WAIT_TOLERANCE: Duration = Duration::from_millis(3);

/// Minimum time between the first heartbeat of a rank at which a step is overdue and the heartbeat at which
/// the step times out. Heartbeats are sent every second, but heartbeats queued during a pause of this process
/// are read at once.
const HEARTBEAT_DISTANCE_MIN_MS: u64 = 500;

/// Minimum time between two calls of `poll` that counts as a pause of this process. The caller polls several
/// times a second.
const PAUSE_MIN_MS: u64 = 1_000;
/// Milliseconds of a pause that still count as step time, so that a hang is detected even if every poll is
/// late.
const POLL_INTERVAL_MS: u64 = 250;

/// A step that was sent and whose output has not arrived.
#[derive(Debug)]
struct WatchedStep {
    step: StepId,
    /// Earliest time at which the executors could start the step.
    started_ms: u64,
    /// Whether this process was paused since the step was sent, so that the step time is unknown.
    paused: bool,
    work: StepWorkload,
    /// Whether some rows of the step wait for grammar bitmasks in the sampler.
    masked: bool,
}

/// Steps that one rank has finished or has reported as overdue.
#[derive(Debug, Default)]
struct RankProgress {
    /// Newest step that the rank has finished.
    last_done: StepId,
    /// Step that was overdue at the last heartbeat of the rank, and the time of the first heartbeat at which
    /// this step was overdue.
    overdue: Option<(StepId, u64)>,
}

/// Result of `StepWatchdog::on_heartbeat`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct StragglerReport {
    /// Ranks that were newly found, at this heartbeat, not to have finished an overdue step; by rank within
    /// the replica.
    pub stragglers: Vec<u16>,
    /// Step timeout, if the executors are considered failed.
    pub timeout: Option<StepTimeout>,
}

/// A step that exceeded its deadline.
#[derive(Debug, PartialEq, Eq)]
pub struct StepTimeout {
    /// Step id.
    pub step: StepId,
    /// Milliseconds since the executors could start the step.
    pub after_ms: u64,
    /// Deadline of the step in milliseconds.
    pub limit_ms: u64,
}

/// Detects steps that exceed their deadline, and the ranks that have not finished such a step.
#[derive(Debug)]
pub struct StepWatchdog {
    /// Progress of the ranks, by rank within the replica.
    ranks: Vec<RankProgress>,
    deadline: StepDeadlineEstimator,
    /// Steps in flight, oldest first.
    steps: VecDeque<WatchedStep>,
    /// Time of the last poll.
    polled_ms: u64,
}

impl StepWatchdog {
    /// Creates a watchdog for a replica of `ranks` ranks with no step in flight.
    pub fn new(ranks: usize, deadline: StepDeadlineEstimator) -> Self {
        let ranks = (0..ranks).map(|_| RankProgress::default()).collect();
        Self { ranks, deadline, steps: VecDeque::new(), polled_ms: 0 }
    }

    /// Detects pauses of this process; called several times a second. A step that was sent before a pause may
    /// not have been written to the link yet. Therefore only `POLL_INTERVAL_MS` of a pause count as step
    /// time.
    pub fn poll(&mut self, now_ms: u64) {
        let pause_ms = now_ms.saturating_sub(self.polled_ms);
        self.polled_ms = now_ms;
        if pause_ms >= PAUSE_MIN_MS {
            for watched in &mut self.steps {
                watched.started_ms = now_ms.min(watched.started_ms + pause_ms - POLL_INTERVAL_MS);
                watched.paused = true;
            }
        }
    }

    /// Discards all steps in flight after an executor failure.
    pub fn on_executor_failure(&mut self) {
        self.steps.clear();
        for progress in &mut self.ranks {
            progress.overdue = None;
        }
    }

    /// Returns the costs of steps, estimated from the steps so far.
    pub fn step_costs(&self) -> StepCosts {
        self.deadline.costs()
    }

    /// Records a step that was sent to all ranks. `masked`: whether some of its rows wait for grammar
    /// bitmasks. Returns the deadline of the step.
    pub fn step_sent(
        &mut self,
        step: StepId,
        work: StepWorkload,
        masked: bool,
        now_ms: u64,
    ) -> Duration {
        self.steps.push_back(WatchedStep { step, started_ms: now_ms, paused: false, work, masked });
        self.deadline.limit(work)
    }

    /// Returns the expected time until the output of the newest step arrives, at most half of the step's
    /// deadline.
    pub fn expected_wait(&self) -> Duration {
        let expected = self.steps.iter().map(|step| self.deadline.expected(step.work)).sum();
        let newest =
            self.steps.back().map_or(Duration::ZERO, |step| self.deadline.limit(step.work) / 2);
        newest.min(expected)
    }

    /// Records the output of a step and corrects the expected step time.
    pub fn step_answered(&mut self, step: StepId, now_ms: u64) {
        self.rank_done(0, step);
        while let Some(oldest) = self.steps.pop_front_if(|watched| watched.step <= step) {
            let step_time = Duration::from_millis(now_ms.saturating_sub(oldest.started_ms));
            let expected = self.deadline.expected(oldest.work);
            // The time that a step waited for grammar bitmasks must not lengthen the next deadline. Such a
            // wait is short, so if a step took much longer than expected, the bitmasks are not the cause.
            let mask_wait =
                oldest.masked && step_time < expected + expected / 4 + MASK_WAIT_TOLERANCE;
            let counted = if mask_wait { expected } else { step_time };
            if !oldest.paused {
                self.deadline.observe(oldest.work, step_time.min(counted));
            }
            // Executors start a step only after they have finished the previous one.
            if let Some(next) = self.steps.front_mut() {
                next.started_ms = next.started_ms.max(now_ms);
            }
        }
    }

    /// Records that a rank finished a step.
    pub fn rank_done(&mut self, rank: u16, step: StepId) {
        if let Some(progress) = self.ranks.get_mut(usize::from(rank)) {
            progress.last_done = progress.last_done.max(step);
        }
    }

    /// Returns the start time and the deadline of the oldest step in flight, in milliseconds.
    pub fn oldest_step(&self) -> Option<(u64, u64)> {
        let oldest = self.steps.front()?;
        Some((oldest.started_ms, self.deadline.limit(oldest.work).as_millis() as u64))
    }

    /// Records a heartbeat of a rank. A step times out only if it was overdue at two heartbeats of the same
    /// rank that were read at different times: if the thread that reads the link was paused, the step's
    /// output may be queued after the first heartbeat.
    pub fn on_heartbeat(&mut self, rank: u16, now_ms: u64) -> StragglerReport {
        let Some(progress) = self.ranks.get_mut(usize::from(rank)) else {
            return StragglerReport::default();
        };
        let overdue = self.steps.front().filter(|oldest| {
            let limit_ms = self.deadline.limit(oldest.work).as_millis();
            u128::from(now_ms.saturating_sub(oldest.started_ms)) > limit_ms
        });
        let Some(oldest) = overdue else {
            progress.overdue = None;
            return StragglerReport::default();
        };
        if let Some((step, since_ms)) = progress.overdue
            && step == oldest.step
        {
            let at_later_time = now_ms.saturating_sub(since_ms) >= HEARTBEAT_DISTANCE_MIN_MS;
            return StragglerReport {
                stragglers: Vec::new(),
                timeout: at_later_time.then(|| self.step_timeout(oldest, now_ms)),
            };
        }
        progress.overdue = Some((oldest.step, now_ms));
        StragglerReport { stragglers: self.new_stragglers(oldest.step), timeout: None }
    }

    /// Returns the ranks that have not finished the overdue step `overdue_step`. They are reported once, at
    /// the first heartbeat at which the step is overdue.
    fn new_stragglers(&self, overdue_step: StepId) -> Vec<u16> {
        let is_overdue = |progress: &&RankProgress| {
            progress.overdue.is_some_and(|(step, _)| step == overdue_step)
        };
        let is_first_report = self.ranks.iter().filter(is_overdue).count() == 1;
        if is_first_report { self.ranks_without(overdue_step).collect() } else { Vec::new() }
    }

    /// Returns the ranks that have not finished the oldest step in flight.
    pub fn stragglers(&self) -> impl Iterator<Item = u16> {
        self.steps.front().into_iter().flat_map(|oldest| self.ranks_without(oldest.step))
    }

    /// Returns the ranks that have not finished `step`. If every rank waits in a collective, these are all
    /// ranks.
    fn ranks_without(&self, step: StepId) -> impl Iterator<Item = u16> {
        let ranks = (0..).zip(&self.ranks);
        ranks.filter(move |(_, progress)| progress.last_done < step).map(|(rank, _)| rank)
    }

    fn step_timeout(&self, oldest: &WatchedStep, now_ms: u64) -> StepTimeout {
        let limit_ms = self.deadline.limit(oldest.work).as_millis() as u64;
        StepTimeout { step: oldest.step, after_ms: now_ms - oldest.started_ms, limit_ms }
    }
}

#[cfg(test)]
mod tests;
