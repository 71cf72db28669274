//! Step metrics, written only by the scheduler thread.

use super::histogram_buckets::HistogramFamily;
use super::metric_registrar::{MetricRegistrar, ReplicaOrSharedSeries};
use super::step_ring::{StepTimingRecord, StepTimingRing};
use prometheus::{Counter, Error, Histogram, IntCounter};
use protocol::Replica;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Phase of a step whose duration is observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPhase {
    /// The scheduler plans the step.
    Plan,
    /// The scheduler allocates blocks and writes the batch.
    Commit,
    /// The scheduler processes step outputs and submissions.
    Apply,
    /// The batch is sent to the executors, after the metrics of this iteration of the scheduler loop (tick)
    /// are updated.
    Send,
    /// Time from the send, or from the output of the previous step if that was later, to the output of the
    /// step.
    Wait,
    /// Duration of the step as measured by the executor.
    Device,
}

/// Values of the label `phase`, in the order of `StepPhase`.
const PHASES: [&str; 6] = ["plan", "commit", "apply", "send", "wait", "device"];

/// Step metrics, and the timing records of the newest steps.
pub struct StepMetrics {
    phases: [ReplicaOrSharedSeries<Histogram>; 6],
    rows: [ReplicaOrSharedSeries<Histogram>; 2],
    tokens: ReplicaOrSharedSeries<Histogram>,
    cpu: Counter,
    idle: Counter,
    replays: ReplicaOrSharedSeries<IntCounter>,
    eager: ReplicaOrSharedSeries<IntCounter>,
    /// Recent output tokens per second of each replica, stored as the bits of an `f64`.
    throughput: Vec<AtomicU64>,
    /// Timing records of the newest steps.
    pub ring: StepTimingRing,
}

impl StepMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        Ok(Self {
            phases: f.histograms_of_replicas("hadron:step_seconds", "Duration of each phase of a step.", HistogramFamily::StepSeconds, "phase", PHASES)?,
            rows: f.histograms_of_replicas("hadron:step_rows", "Rows of a step, by kind.", HistogramFamily::StepRows, "kind", ["decode", "prefill"])?,
            tokens: f.histogram_of_replicas("vllm:iteration_tokens_total", "Tokens of a step: prompt tokens and generated tokens.", HistogramFamily::IterationTokens)?,
            cpu: f.seconds("hadron:scheduler_cpu_seconds_total", "CPU time of the scheduler thread.")?,
            idle: f.seconds("hadron:scheduler_idle_seconds_total", "Time that the scheduler thread was idle.")?,
            replays: f.counter_of_replicas("hadron:graph_replays_total", "Steps that replayed a captured graph.")?.into(),
            eager: f.counter_of_replicas("hadron:eager_steps_total", "Eager steps, which replay no captured graph.")?.into(),
            throughput: (0..f.replicas()).map(|_| AtomicU64::new(0)).collect(),
            ring: StepTimingRing::default(),
        })
    }

    /// Records the scheduling times and the sizes of a step that was sent.
    pub fn step_sent(&self, replica: Replica, step: &StepTimingRecord) {
        let scheduling = [step.plan_ns, step.commit_ns, step.apply_ns, step.send_ns];
        for (histogram, ns) in self.phases.iter().zip(scheduling) {
            histogram.of(replica).observe(seconds(ns));
        }
        self.rows[0].of(replica).observe(step.decode_rows as f64);
        self.rows[1].of(replica).observe(step.prefill_rows as f64);
        self.tokens.of(replica).observe(step.tokens as f64);
    }

    /// Records the wait and device times of a completed step.
    pub fn step_completed(&self, replica: Replica, step: &StepTimingRecord) {
        let phase = |phase: StepPhase| self.phases[phase as usize].of(replica);
        phase(StepPhase::Wait).observe(seconds(step.wait_ns));
        phase(StepPhase::Device).observe(seconds(step.device_ns));
        let kind = if step.replayed == 1 { &self.replays } else { &self.eager };
        kind.of(replica).inc();
        self.ring.push(step);
    }

    /// Adds time during which the scheduler thread slept.
    pub fn idle(&self, time: Duration) {
        self.idle.inc_by(time.as_secs_f64());
    }

    /// Sets the total CPU time of the scheduler thread.
    pub fn cpu(&self, total: Duration) {
        self.cpu.inc_by((total.as_secs_f64() - self.cpu.get()).max(0.0));
    }

    /// Sets the recent output tokens per second of a replica.
    pub fn set_throughput(&self, replica: Replica, tokens_per_s: f64) {
        if let Some(throughput) = self.throughput.get(usize::from(replica.0)) {
            throughput.store(tokens_per_s.to_bits(), Ordering::Relaxed);
        }
    }

    /// Returns the recent output tokens per second of a replica.
    pub fn throughput(&self, replica: Replica) -> f64 {
        let throughput = self.throughput.get(usize::from(replica.0));
        throughput.map_or(0.0, |bits| f64::from_bits(bits.load(Ordering::Relaxed)))
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}
