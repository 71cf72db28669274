//! Measures the times of the scheduler thread: six clock reads per step, none of them inside the scheduler.

use metrics::{ServerMetrics, StepTimingRecord};
use protocol::{Batch, Replica, StepId, StepOutput};
use rustix::time::{ClockId, clock_gettime};
use scheduler::{SchedulerEffect, SchedulerStats, TickPhase, TickTimer};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which the CPU time of the scheduler thread is read; unlike the other clock reads, this read is
/// a system call.
const CPU_PERIOD: Duration = Duration::from_millis(100);
/// Interval over which token throughput is averaged.
const THROUGHPUT_PERIOD: Duration = Duration::from_secs(1);

/// Step in flight, with its send time and the timings recorded so far.
struct InFlightStep {
    sent: Instant,
    record: StepTimingRecord,
}

/// Steps in flight and last statistics of one replica.
#[derive(Default)]
struct ReplicaStepState {
    in_flight: VecDeque<InFlightStep>,
    running: u32,
    waiting: u32,
    generated: u64,
    generated_before: u64,
}

/// Time spent in each phase of the scheduler's `tick` function.
#[derive(Default)]
struct SchedulerTimes {
    apply: Duration,
    plan: Duration,
    commit: Duration,
}

/// Measures the durations of the phases of the scheduler thread and of its steps, and updates the metrics.
pub(crate) struct StepTimer {
    metrics: Arc<ServerMetrics>,
    /// Time of the last clock read, at which the phase being timed began.
    last: Instant,
    /// Time spent in the scheduler's `tick` function since the last tick that sent a step.
    scheduler_times: SchedulerTimes,
    /// Part of `scheduler_times` that is attributed to each step that this tick sends: the time is divided
    /// equally among these steps.
    share: SchedulerTimes,
    cpu_read: Instant,
    throughput_since: Instant,
    replicas: Vec<ReplicaStepState>,
}

impl StepTimer {
    /// Creates the clock of the scheduler thread of a server with `replicas` replicas.
    pub(crate) fn new(metrics: Arc<ServerMetrics>, replicas: usize) -> Self {
        let now = Instant::now();
        Self {
            metrics,
            last: now,
            scheduler_times: SchedulerTimes::default(),
            share: SchedulerTimes::default(),
            cpu_read: now,
            throughput_since: now,
            replicas: (0..replicas).map(|_| ReplicaStepState::default()).collect(),
        }
    }

    /// Records that the scheduler thread is about to wait for messages.
    pub(crate) fn wait_begins(&mut self) {
        self.last = Instant::now();
        if self.last - self.cpu_read >= CPU_PERIOD {
            self.cpu_read = self.last;
            let cpu_time = clock_gettime(ClockId::ThreadCPUTime);
            let cpu_time = Duration::new(cpu_time.tv_sec as u64, cpu_time.tv_nsec as u32);
            self.metrics.steps.cpu(cpu_time);
        }
        let since = self.last - self.throughput_since;
        if since >= THROUGHPUT_PERIOD {
            self.throughput_since = self.last;
            for (clock, replica) in self.replicas.iter_mut().zip((0..).map(Replica)) {
                let tokens = clock.generated - clock.generated_before;
                clock.generated_before = clock.generated;
                self.metrics.steps.set_throughput(replica, tokens as f64 / since.as_secs_f64());
            }
        }
    }

    /// Records that the scheduler thread has woken, because of a message or a timeout.
    pub(crate) fn wait_ends(&mut self) {
        let slept = self.elapsed_since_last();
        self.metrics.steps.idle(slept);
    }

    /// Records the end of a scheduler tick: its time is divided equally among the steps that the tick sends.
    pub(crate) fn tick_done(&mut self, effects: &[SchedulerEffect]) {
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

    /// Records that a batch was sent to the executors of a replica; `deadline` applies to its step.
    pub(crate) fn batch_sent(
        &mut self,
        replica: Replica,
        batch: &BatchSummary,
        deadline: Duration,
        now_ms: u64,
    ) {
        let send_ns = self.elapsed_since_last().as_nanos() as u64;
        let record = StepTimingRecord {
            replica: u64::from(replica.0),
            step: batch.step.0,
            sent_ms: now_ms,
            decode_rows: batch.decode_rows,
            prefill_rows: batch.prefill_rows,
            tokens: batch.tokens,
            prompt_pairs: batch.attention_pairs,
            deadline_ms: deadline.as_millis() as u64,
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

    fn replica_clock(&mut self, replica: Replica) -> &mut ReplicaStepState {
        &mut self.replicas[usize::from(replica.0)]
    }

    /// Updates the step metrics with the output of a step: wait, device time, expert load, collectives. Must
    /// be called before the scheduler tick that processes the output.
    pub(crate) fn step_completed(&mut self, replica: Replica, output: &StepOutput) {
        let (now, steps) = (self.last, &self.metrics.steps);
        self.metrics.experts.step_completed(replica, &output.expert_tokens);
        self.metrics.collectives.step_completed(replica, &output.timing.collectives);
        let clock = &mut self.replicas[usize::from(replica.0)];
        while let Some(InFlightStep { sent, record }) =
            clock.in_flight.pop_front_if(|step| step.record.step <= output.step.0)
        {
            if record.step == output.step.0 {
                let timing = &output.timing;
                let record = StepTimingRecord {
                    wait_ns: now.saturating_duration_since(sent).as_nanos() as u64,
                    device_ns: timing.inputs_ns + timing.forward_ns + timing.sample_ns,
                    replayed: u64::from(timing.replayed),
                    running: u64::from(clock.running),
                    waiting: u64::from(clock.waiting),
                    ..record
                };
                steps.step_completed(replica, &record);
            }
            // The device starts a step only after the previous one has finished, so the wait for the next
            // step begins no earlier than now.
            if let Some(next) = clock.in_flight.front_mut() {
                next.sent = next.sent.max(now);
            }
        }
    }

    /// Drops the steps in flight of a replica after an executor failure.
    pub(crate) fn executors_failed(&mut self, replica: Replica) {
        self.replica_clock(replica).in_flight.clear();
    }

    /// Updates the metrics with changed statistics of a replica: queue lengths, generated tokens, and the
    /// waiting time of the request at the head of the queue.
    pub(crate) fn stats_changed(&mut self, stats: &SchedulerStats, now_ms: u64) {
        let wait_ms = stats.head_submitted_ms.map(|at_ms| now_ms.saturating_sub(at_ms));
        self.metrics.queue.set_head_wait(stats.replica, wait_ms.map(Duration::from_millis));
        let clock = self.replica_clock(stats.replica);
        (clock.running, clock.waiting) = (stats.running, stats.waiting);
        clock.generated = stats.generated_tokens_total;
    }

    fn elapsed_since_last(&mut self) -> Duration {
        let now = Instant::now();
        let elapsed = now - self.last;
        self.last = now;
        elapsed
    }
}

impl TickTimer for StepTimer {
    fn phase_done(&mut self, phase: TickPhase) {
        let elapsed = self.elapsed_since_last();
        match phase {
            TickPhase::Apply => self.scheduler_times.apply += elapsed,
            TickPhase::Plan => self.scheduler_times.plan += elapsed,
            TickPhase::Commit => self.scheduler_times.commit += elapsed,
        }
    }
}

/// Numbers of rows (scheduled requests) and tokens of a batch, for metrics and step deadlines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSummary {
    /// Id of the batch's step.
    pub step: StepId,
    /// Number of rows (scheduled requests) with one token, that is, decodes.
    pub decode_rows: u64,
    /// Number of rows (scheduled requests) with several tokens, that is, prefills.
    pub prefill_rows: u64,
    /// Number of tokens in the forward pass, including draft tokens.
    pub tokens: u64,
    /// Attention pairs: the sum, over the prefill rows, of the number of tokens times the context length at
    /// the end of the row.
    pub attention_pairs: u64,
}

impl BatchSummary {
    /// Computes the summary of `batch`.
    pub(crate) fn of(batch: &Batch) -> Self {
        let (mut decode_rows, mut tokens, mut attention_pairs) = (0, 0, 0);
        for row in &batch.rows {
            tokens += u64::from(row.len) + u64::from(row.drafts);
            if row.len == 1 {
                decode_rows += 1;
            } else {
                attention_pairs += u64::from(row.len) * u64::from(row.start + row.len);
            }
        }
        let prefill_rows = batch.rows.len() as u64 - decode_rows;
        Self { step: batch.step, decode_rows, prefill_rows, tokens, attention_pairs }
    }
}

/// Returns, for each step that a scheduler tick sends, the maximum number of attention pairs of any replica.
/// If replicas run in lockstep (execute each step together), the replica with the most work determines the
/// duration of the step.
pub(crate) fn max_attention_pairs(effects: &[SchedulerEffect]) -> Vec<(StepId, u64)> {
    let mut max_pairs: Vec<(StepId, u64)> = Vec::new();
    for effect in effects {
        let SchedulerEffect::SendBatch { batch, .. } = effect else { continue };
        let pairs = BatchSummary::of(batch).attention_pairs;
        match max_pairs.iter_mut().find(|(step, _)| *step == batch.step) {
            Some((_, max)) => *max = pairs.max(*max),
            None => max_pairs.push((batch.step, pairs)),
        }
    }
    max_pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{BatchRow, Epoch, RequestId, RowInput, SequenceSlot, StepLaunchMode};

    fn row(start: u32, len: u32) -> BatchRow {
        BatchRow {
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
            state_slots: protocol::ThinVec::new(),
            next_token: None,
            seq_init: None,
        }
    }

    fn send(replica: u16, step: u64, rows: Vec<BatchRow>) -> SchedulerEffect {
        let (step, dispatch) = (StepId(step), StepLaunchMode::Eager { tokens: 1 });
        let batch = Batch { step, epoch: Epoch(1), dispatch, moe_tokens: 0, draft_rows: 0, rows };
        SchedulerEffect::SendBatch { replica: Replica(replica), batch }
    }

    #[test]
    fn lockstep_replicas_share_the_largest_pair_count() {
        let effects = [
            send(0, 7, vec![row(0, 10), row(300, 1)]),
            send(1, 7, vec![row(1_000, 20), row(5, 2)]),
            send(0, 8, vec![row(12, 1)]),
            send(1, 8, Vec::new()),
        ];
        assert_eq!(
            max_attention_pairs(&effects),
            [(StepId(7), 20 * 1_020 + 2 * 7), (StepId(8), 0)]
        );
    }
}
