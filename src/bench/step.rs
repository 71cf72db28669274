//! `hadron bench step`: measures the scheduler's time per step (apply the outputs of a step, plan and commit
//! the next step) if all requests decode. A simulated device returns outputs immediately. Only
//! `Scheduler::tick` is timed, not the construction of the outputs.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use protocol::{
    Batch, KvGroup, KvKind, KvSpec, RequestId, RowOutput, SamplingParams, StepOutput, StepTiming,
};
use scheduler::{
    KvConfig, RequestSubmission, Scheduler, SchedulerConfig, SchedulerEffect, SchedulerEvent,
    SchedulerLimits,
};
use serde::Serialize;
use serde_json::json;

use super::report;
use super::samples::LatencySummary;
use crate::config::BenchStepArgs;

/// Vocabulary size from which prompt and output tokens are taken.
const VOCAB_SIZE: u32 = 32_000;

/// Number of decode steps that run before the measurement.
const WARMUP_STEPS: u32 = 20;

/// Results of `hadron bench step` for one number of running requests.
#[derive(Debug, Serialize)]
struct StepBenchReport {
    running: u32,
    steps: usize,
    steps_per_s: f64,
    ns_per_request: f64,
    step_us: LatencySummary,
}

/// Measures every number of running requests in `args`, one after the other.
pub(super) fn run(args: &BenchStepArgs) -> Result<ExitCode> {
    if args.running.contains(&0) || args.steps == 0 || args.input_len == 0 || args.block_size == 0 {
        bail!("--running, --steps, --input-len and --block-size: at least 1");
    }
    let levels: Vec<StepBenchReport> =
        args.running.iter().map(|&running| measure(args, running)).collect::<Result<_>>()?;
    let row = |l: &StepBenchReport| {
        vec![
            l.running.to_string(),
            format!("{:.0}", l.steps_per_s),
            format!("{:.1}", l.ns_per_request),
            format!("{:.2}", l.step_us.mean),
            format!("{:.2}", l.step_us.p50),
            format!("{:.2}", l.step_us.p99),
        ]
    };
    let headings = ["running", "steps/s", "ns/request", "step µs mean", "p50", "p99"];
    report::print_table(&headings, &levels.iter().map(row).collect::<Vec<_>>())?;
    let settings = json!({
        "input_len": args.input_len,
        "block_size": args.block_size,
        "steps": args.steps,
    });
    report::write(args.output.as_deref(), &report::result("step", &settings, &levels))?;
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &BenchStepArgs, running: u32) -> Result<StepBenchReport> {
    let mut bench = SchedulerStepBench::new(args, running)?;
    let mut seconds = Vec::with_capacity(args.steps as usize);
    let mut warmup_steps = 0;
    while seconds.len() < args.steps as usize {
        let (rows, elapsed) = bench.step()?;
        let decoding = rows == running as usize;
        if !decoding {
            continue;
        }
        if warmup_steps < WARMUP_STEPS {
            warmup_steps += 1;
            continue;
        }
        seconds.push(elapsed);
    }
    let total: f64 = seconds.iter().sum();
    let steps = seconds.len();
    // `from_seconds` converts seconds to milliseconds. Here its input is 1,000 times the seconds, so that the
    // result is in microseconds.
    let step_us = LatencySummary::from_seconds(seconds.into_iter().map(|s| s * 1e3).collect());
    Ok(StepBenchReport {
        running,
        steps,
        steps_per_s: steps as f64 / total,
        ns_per_request: total * 1e9 / steps as f64 / f64::from(running),
        step_us,
    })
}

/// Scheduler with a simulated device that returns outputs immediately.
struct SchedulerStepBench {
    scheduler: Scheduler,
    inbox: Vec<SchedulerEvent>,
    effects: Vec<SchedulerEffect>,
    now_ms: u64,
}

impl SchedulerStepBench {
    fn new(args: &BenchStepArgs, running: u32) -> Result<Self> {
        // `max_tokens` covers the prefill steps (with 8 to spare), the warm-up steps and the measured steps,
        // so that no request finishes during the measurement.
        let prefill_steps = running * args.input_len.div_ceil(512) + 8;
        let max_tokens = args.steps + WARMUP_STEPS + prefill_steps;
        let length = args.input_len + max_tokens;
        let limits = SchedulerLimits {
            tokens_per_step: (running + 1).max(8192),
            max_num_seqs: running,
            max_waiting_requests: running.max(16),
            ..SchedulerLimits::cpu(length + 1, VOCAB_SIZE)
        };
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: args.block_size, groups: vec![group] };
        let blocks = u64::from(running) * u64::from(length.div_ceil(args.block_size) + 1);
        let blocks = u32::try_from(blocks).context("too many blocks; reduce --steps")?;
        let scheduler =
            Scheduler::new(SchedulerConfig::new(limits, KvConfig::new(spec, blocks, [1, 2])))?;
        let submit = |index: u32| {
            // Prompts differ at the first token, so requests share no blocks.
            let token = |at: u32| (index.wrapping_mul(7919) + at.wrapping_mul(31)) % VOCAB_SIZE;
            SchedulerEvent::Submit(Box::new(RequestSubmission {
                id: RequestId(u64::from(index) + 1),
                tokens: (0..args.input_len).map(token).collect(),
                max_tokens,
                sampling: SamplingParams::greedy(),
                first_masked_token: None,
                rng_key: 0,
                eos_ids: Vec::new(),
                stop_ids: Vec::new(),
                priority: 0,
                extra_keys: None,
                replica: None,
                block_keys: Vec::new(),
            }))
        };
        let inbox = (0..running).map(submit).collect();
        Ok(Self { scheduler, inbox, effects: Vec::new(), now_ms: 0 })
    }

    /// Runs one step. Returns the number of rows of its batch (0 if any row is prefill) and the seconds that
    /// `tick` took.
    fn step(&mut self) -> Result<(usize, f64)> {
        self.now_ms += 1;
        let start = Instant::now();
        self.scheduler.tick(self.now_ms, &mut self.inbox, &mut self.effects);
        let elapsed = start.elapsed().as_secs_f64();
        let mut rows = None;
        for effect in self.effects.drain(..) {
            if let SchedulerEffect::SendBatch { replica, batch } = effect {
                let decoding = batch.rows.iter().all(|row| row.len == 1);
                rows = Some(if decoding { batch.rows.len() } else { 0 });
                self.inbox
                    .push(SchedulerEvent::StepOutput { replica, output: simulated_output(&batch) });
            }
        }
        Ok((rows.context("the scheduler sent no batch")?, elapsed))
    }
}

/// Returns a step output with one token for each row whose last position is sampled.
fn simulated_output(batch: &Batch) -> StepOutput {
    let row = |row: &protocol::BatchRow| RowOutput {
        sampled_tokens: row.samples.then_some(row.start % VOCAB_SIZE).into_iter().collect(),
        ..RowOutput::default()
    };
    StepOutput {
        step: batch.step,
        epoch: batch.epoch,
        rows: batch.rows.iter().map(row).collect(),
        timing: StepTiming::default(),
        expert_tokens: Vec::new(),
    }
}
