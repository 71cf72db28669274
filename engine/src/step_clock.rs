//! Timing of the scheduler thread: six clock reads per step, none of them inside the scheduler.

use metrics::{ServerMetrics, StepTimingRecord};
use protocol::{Batch, Replica, StepId, StepOutput};
use rustix::time::{ClockId, clock_gettime};
use scheduler::{SchedulerEffect, StepStats, TickPhase, TickTimer};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of CPU-time reads of the thread, which are system calls, unlike the other clock reads.
const CPU_PERIOD: Duration = Duration::from_millis(100);
/// Interval over which token throughput is averaged.
const RATE_PERIOD: Duration = Duration::from_secs(1);

/// Step in flight.
struct InFlightStep {
    sent: Instant,
    record: StepTimingRecord,
}

/// Timing state of one replica.
#[derive(Default)]
struct ReplicaClock {
    in_flight: VecDeque<InFlightStep>,
    running: u32,
    waiting: u32,
    generated: u64,
    generated_before: u64,
}

/// Time spent in the phases of scheduler ticks.
#[derive(Default)]
struct SchedulerTimes {
    apply: Duration,
    plan: Duration,
    commit: Duration,
}

/// Clocks of the scheduler thread.
pub(crate) struct StepClock {
    metrics: Arc<ServerMetrics>,
    /// Time of the last clock read.
    last: Instant,
    /// Time of scheduler work since the last tick that sent a step.
    scheduler_times: SchedulerTimes,
    /// Share of `scheduler_times` of each step sent by this tick.
    share: SchedulerTimes,
    cpu_read: Instant,
    rate_since: Instant,
    replicas: Vec<ReplicaClock>,
}

impl StepClock {
    /// Starts the clocks for `replicas` replicas.
    pub(crate) fn new(metrics: Arc<ServerMetrics>, replicas: usize) -> Self {
        let now = Instant::now();
        Self {
            metrics,
            last: now,
            scheduler_times: SchedulerTimes::default(),
            share: SchedulerTimes::default(),
            cpu_read: now,
            rate_since: now,
            replicas: (0..replicas).map(|_| ReplicaClock::default()).collect(),
        }
    }

    /// Records that the thread is about to wait for messages.
    pub(crate) fn sleeps(&mut self) {
        self.last = Instant::now();
        if self.last - self.cpu_read >= CPU_PERIOD {
            self.cpu_read = self.last;
            let spent = clock_gettime(ClockId::ThreadCPUTime);
            let spent = Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32);
            self.metrics.steps.cpu(spent);
        }
        let since = self.last - self.rate_since;
        if since >= RATE_PERIOD {
            self.rate_since = self.last;
            for (lane, replica) in self.replicas.iter_mut().zip((0..).map(Replica)) {
                let tokens = lane.generated - lane.generated_before;
                lane.generated_before = lane.generated;
                self.metrics.steps.set_throughput(replica, tokens as f64 / since.as_secs_f64());
            }
        }
    }

    /// Records that the thread has woken, because of a message or a timeout.
    pub(crate) fn wakes(&mut self) {
        let slept = self.take_lap();
        self.metrics.steps.idle(slept);
    }

    /// Records the end of a tick: its time is divided equally among the steps it sends.
    pub(crate) fn ticked(&mut self, effects: &[SchedulerEffect]) {
        let sends = effects
            .iter()
            .filter(|effect| matches!(effect, SchedulerEffect::SendBatch { .. }))
            .count();
        if sends > 0 {
            let SchedulerTimes { apply, plan, commit } = std::mem::take(&mut self.scheduler_times);
            let sends = sends as u32;
            let (apply, plan, commit) = (apply / sends, plan / sends, commit / sends);
            self.share = SchedulerTimes { apply, plan, commit };
        }
    }

    /// Records that a batch was sent to the executors of a replica; `allowed` is the deadline of its step.
    pub(crate) fn sent(
        &mut self,
        replica: Replica,
        batch: &BatchSummary,
        allowed: Duration,
        now_ms: u64,
    ) {
        let send_ns = self.take_lap().as_nanos() as u64;
        let record = StepTimingRecord {
            replica: u64::from(replica.0),
            step: batch.step.0,
            sent_ms: now_ms,
            decode_rows: batch.decode_rows,
            prefill_rows: batch.prefill_rows,
            tokens: batch.tokens,
            prompt_pairs: batch.pairs,
            allowed_ms: allowed.as_millis() as u64,
            plan_ns: self.share.plan.as_nanos() as u64,
            commit_ns: self.share.commit.as_nanos() as u64,
            apply_ns: self.share.apply.as_nanos() as u64,
            send_ns,
            ..StepTimingRecord::default()
        };
        self.metrics.steps.step_sent(replica, &record);
        let sent = self.last;
        self.replica_clock(replica).in_flight.push_back(InFlightStep { sent, record });
    }

    fn replica_clock(&mut self, replica: Replica) -> &mut ReplicaClock {
        &mut self.replicas[usize::from(replica.0)]
    }

    /// Records the output of a step, before the tick that processes it.
    pub(crate) fn step_completed(&mut self, replica: Replica, output: &StepOutput) {
        let (now, steps) = (self.last, &self.metrics.steps);
        self.metrics.experts.step_completed(replica, &output.expert_tokens);
        self.metrics.collectives.step_completed(replica, &output.timing.collectives);
        let lane = &mut self.replicas[usize::from(replica.0)];
        while let Some(InFlightStep { sent, record }) =
            lane.in_flight.pop_front_if(|flying| flying.record.step <= output.step.0)
        {
            if record.step == output.step.0 {
                let timing = &output.timing;
                let record = StepTimingRecord {
                    wait_ns: now.saturating_duration_since(sent).as_nanos() as u64,
                    device_ns: timing.inputs_ns + timing.forward_ns + timing.sample_ns,
                    replayed: u64::from(timing.replayed),
                    running: u64::from(lane.running),
                    waiting: u64::from(lane.waiting),
                    ..record
                };
                steps.step_completed(replica, &record);
            }
            // The device starts a step only after the previous one.
            if let Some(next) = lane.in_flight.front_mut() {
                next.sent = next.sent.max(now);
            }
        }
    }

    /// Drops the steps in flight of a replica after an executor failure.
    pub(crate) fn executors_failed(&mut self, replica: Replica) {
        self.replica_clock(replica).in_flight.clear();
    }

    /// Records changed counters of a replica.
    pub(crate) fn stats_changed(&mut self, stats: &StepStats, now_ms: u64) {
        let waited_ms = stats.head_submitted_ms.map(|at_ms| now_ms.saturating_sub(at_ms));
        self.metrics.queue.set_head_wait(stats.replica, waited_ms.map(Duration::from_millis));
        let lane = self.replica_clock(stats.replica);
        (lane.running, lane.waiting) = (stats.running, stats.waiting);
        lane.generated = stats.generated_tokens_total;
    }

    fn take_lap(&mut self) -> Duration {
        let now = Instant::now();
        let lap = now - self.last;
        self.last = now;
        lap
    }
}

impl TickTimer for StepClock {
    fn phase_done(&mut self, part: TickPhase) {
        let lap = self.take_lap();
        match part {
            TickPhase::Apply => self.scheduler_times.apply += lap,
            TickPhase::Plan => self.scheduler_times.plan += lap,
            TickPhase::Commit => self.scheduler_times.commit += lap,
        }
    }
}

/// Summary of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSummary {
    /// Step of the batch.
    pub step: StepId,
    /// Number of rows with one token (decode).
    pub decode_rows: u64,
    /// Number of rows with several tokens (prefill).
    pub prefill_rows: u64,
    /// Number of tokens in the forward pass, including draft tokens.
    pub tokens: u64,
    /// Token-context pairs of attention: for each prefill row, its tokens times its context length at the end
    /// of the row.
    pub pairs: u64,
}

impl BatchSummary {
    /// Computes the summary of `batch`.
    pub(crate) fn of(batch: &Batch) -> Self {
        let (mut decode_rows, mut tokens, mut pairs) = (0, 0, 0);
        for row in &batch.rows {
            tokens += u64::from(row.len) + u64::from(row.drafts);
            if row.len == 1 {
                decode_rows += 1;
            } else {
                pairs += u64::from(row.len) * u64::from(row.start + row.len);
            }
        }
        let prefill_rows = batch.rows.len() as u64 - decode_rows;
        Self { step: batch.step, decode_rows, prefill_rows, tokens, pairs }
    }
}

/// Largest number of pairs of any replica, for each step of a tick: a lockstep group takes as long as its
/// busiest replica.
pub(crate) fn max_pairs_by_step(effects: &[SchedulerEffect]) -> Vec<(StepId, u64)> {
    let mut most: Vec<(StepId, u64)> = Vec::new();
    for effect in effects {
        let SchedulerEffect::SendBatch { batch, .. } = effect else { continue };
        let pairs = BatchSummary::of(batch).pairs;
        match most.iter_mut().find(|(step, _)| *step == batch.step) {
            Some((_, most)) => *most = pairs.max(*most),
            None => most.push((batch.step, pairs)),
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{BatchRow, DispatchMode, Epoch, RequestId, RowInput, SequenceSlot};

    fn send(replica: u16, step: u64, start_and_len: &[(u32, u32)]) -> SchedulerEffect {
        let row = |&(start, len): &(u32, u32)| BatchRow {
            request: RequestId(1),
            epoch: 1,
            seq_slot: SequenceSlot(0),
            start,
            len,
            drafts: 0,
            samples: true,
            masked: false,
            input: RowInput::Tokens(vec![1].into()),
            table_updates: Vec::new().into(),
            next_token: None,
            seq_init: None,
        };
        let (step, bucket) = (StepId(step), DispatchMode::Eager { tokens: 1 });
        let rows = start_and_len.iter().map(row).collect();
        let batch =
            Batch { step, epoch: Epoch(1), dispatch: bucket, moe_tokens: 0, draft_rows: 0, rows };
        SchedulerEffect::SendBatch { replica: Replica(replica), batch }
    }

    #[test]
    fn lockstep_replicas_share_the_largest_pair_count() {
        let effects = [
            send(0, 7, &[(0, 10), (300, 1)]),
            send(1, 7, &[(1_000, 20), (5, 2)]),
            send(0, 8, &[(12, 1)]),
            send(1, 8, &[]),
        ];
        assert_eq!(max_pairs_by_step(&effects), [(StepId(7), 20 * 1_020 + 2 * 7), (StepId(8), 0)]);
    }
}
