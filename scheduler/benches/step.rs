//! Time of one scheduler step (plan, commit, apply, events) with a device that completes steps immediately.
//!
//! All requests decode on one core without KV events. Prints a Markdown table; with `--bar`, a step time
//! above its bound is an error. Bounds: 50 us at 256 running requests, 150 us at 1,024, 2 ms at 10,000, 1.5
//! ms for a lockstep group of 8 ranks with 1,024 requests each, and a 99th percentile of at most four times
//! the median; 1 ms for any tick with a single request, for any number of blocks.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use protocol::{
    Batch, KvGroup, KvKind, KvSpec, Replica, RequestId, RowOutput, SamplingParams, StepOutput,
    StepTiming, Token, TokenVec,
};
use scheduler::{
    KvConfig, RequestSubmission, Scheduler, SchedulerConfig, SchedulerEffect, SchedulerEvent,
    SchedulerLimits,
};
use std::time::{Duration, Instant};

/// The benchmark uses the allocator of the server.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BLOCK_TOKENS: u32 = 16;
const PROMPT: u32 = 64;
const VOCAB: u32 = 150_000;
const STEPS: usize = 1_000;
/// KV pool size, in blocks, of a small model on a large GPU, for the measurement of a single request.
const MANY_BLOCKS: u32 = 4_000_000;

struct StepBenchCase {
    /// Number of ranks in the lockstep group; 1 = a single replica.
    ranks: u16,
    /// Running requests per rank.
    running: u32,
    depth: u32,
    bar_us: f64,
}

/// Each case has a number of ranks, a number of running requests per rank, and the maximum median step time
/// in microseconds.
const CASES: [(u16, u32, f64); 5] =
    [(1, 1, 50.0), (1, 256, 50.0), (1, 1_024, 150.0), (8, 1_024, 1_500.0), (1, 10_000, 2_000.0)];

impl StepBenchCase {
    /// Returns the number of requests of all ranks.
    fn total_requests(&self) -> u32 {
        u32::from(self.ranks) * self.running
    }

    fn name(&self) -> String {
        match self.ranks {
            1 => self.running.to_string(),
            ranks => format!("{ranks} x {}", self.running),
        }
    }
}

struct StepBenchTimes {
    median: Duration,
    p99: Duration,
    longest: Duration,
}

fn main() {
    let strict = std::env::args().any(|arg| arg == "--bar");
    // A number on the command line selects the cases with that total number of requests, for use with a
    // profiler.
    let selected: Option<u32> = std::env::args().find_map(|arg| arg.parse().ok());
    println!(
        "| running | steps in flight | median | p99 | p99 / median | longest | ns per request | limit |"
    );
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mut slow = slow_cases(selected);
    println!();
    let added = longest_prompt_submit();
    println!(
        "Submitting a prompt of 131,072 tokens (keys computed by the submitter) adds {added:?} to a step."
    );
    let longest = longest_single_request_tick(MANY_BLOCKS);
    println!(
        "A single request in a pool of {MANY_BLOCKS} blocks: its longest tick takes {longest:?}."
    );
    if longest > Duration::from_millis(1) {
        slow.push(1);
    }
    assert!(!strict || slow.is_empty(), "above the bar: {slow:?} running");
}

/// Measures all cases, or only those with `selected` requests, and prints their rows. Returns the total
/// numbers of requests of the cases above their bounds.
fn slow_cases(selected: Option<u32>) -> Vec<u32> {
    let mut slow = Vec::new();
    for depth in [1, 2] {
        for (ranks, running, bar_us) in CASES {
            let case = StepBenchCase { ranks, running, depth, bar_us };
            if selected.is_some_and(|selected| selected != case.total_requests()) {
                continue;
            }
            let times = measure(&case);
            print_row(&case, &times);
            let median_us = times.median.as_secs_f64() * 1e6;
            if median_us > bar_us || (running > 1 && times.p99 > 4 * times.median) {
                slow.push(case.total_requests());
            }
        }
    }
    slow
}

fn print_row(case: &StepBenchCase, times: &StepBenchTimes) {
    let us = |d: Duration| d.as_secs_f64() * 1e6;
    let per_request = times.median.as_nanos() as f64 / f64::from(case.total_requests());
    let ratio = us(times.p99) / us(times.median);
    println!(
        "| {} | {} | {:.1} us | {:.1} us | {ratio:.2} | {:.1} us | {per_request:.0} | {} us |",
        case.name(),
        case.depth,
        us(times.median),
        us(times.p99),
        us(times.longest),
        case.bar_us,
    );
}

/// Returns the requests of a case, each with at most `length` tokens.
fn submissions(case: &StepBenchCase, scheduler: &Scheduler, length: u32) -> Vec<SchedulerEvent> {
    let mut inbox = Vec::new();
    for id in 0..case.total_requests() {
        // Lengths differ, as in real traffic, so that steps allocate blocks at different times.
        let prompt_len = PROMPT - id * 7 % BLOCK_TOKENS;
        let rank = Replica((id % u32::from(case.ranks)) as u16);
        inbox.push(submit(scheduler, u64::from(id), prompt_len, length - prompt_len, rank));
    }
    inbox
}

/// Fills the scheduler with requests, then times single steps. One step contains the batches of all ranks.
fn measure(case: &StepBenchCase) -> StepBenchTimes {
    let steps = if case.total_requests() >= 8_000 { STEPS / 2 } else { STEPS } as u32;
    let length = PROMPT + 4 * steps;
    let mut scheduler = scheduler(case, length);
    let mut inbox = submissions(case, &scheduler, length);
    let mut effects = Vec::new();
    // Runs the prefill and then decode steps until all requests are running, so that no reused buffer grows
    // in the timed steps.
    while scheduler.limits().max_num_seqs > 0 {
        scheduler.tick(0, &mut inbox, &mut effects);
        let rows = complete_steps(&mut effects, &mut inbox);
        if rows == case.running as usize * inbox.len() {
            break;
        }
    }
    let mut times = Vec::new();
    for step in 0..steps + 50 {
        let started = Instant::now();
        scheduler.tick(0, &mut inbox, &mut effects);
        let elapsed = started.elapsed();
        let rows = complete_steps(&mut effects, &mut inbox);
        assert!(rows > 0, "no rows are scheduled");
        // With two steps in flight, one tick may complete two steps: both are counted. The batches of all
        // ranks are one step.
        let completed = (inbox.len() as u32 / u32::from(case.ranks)).max(1);
        if step >= 50 {
            times.push(elapsed / completed);
        }
    }
    times.sort();
    let percentile = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    StepBenchTimes { median: percentile(0.5), p99: percentile(0.99), longest: percentile(1.0) }
}

/// Returns the time that the submission of a very long prompt adds to a tick (one call of `Scheduler::tick`).
fn longest_prompt_submit() -> Duration {
    let case = StepBenchCase { ranks: 1, running: 256, depth: 1, bar_us: 0.0 };
    let mut scheduler = scheduler(&case, 140_000);
    let mut effects = Vec::new();
    let mut worst = Duration::ZERO;
    for id in 0..10 {
        let mut inbox = vec![submit(&scheduler, id, 131_072, 16, Replica(0))];
        let started = Instant::now();
        scheduler.tick(0, &mut inbox, &mut effects);
        worst = worst.max(started.elapsed());
        effects.clear();
    }
    worst
}

/// Returns the time of the longest tick (one call of `Scheduler::tick`) while one request runs alone in a KV
/// pool of `blocks` blocks; median of a hundred runs. Requests that arrive during a tick wait for its end.
fn longest_single_request_tick(blocks: u32) -> Duration {
    let case = StepBenchCase { ranks: 1, running: 1, depth: 1, bar_us: 0.0 };
    let mut scheduler = scheduler_with_blocks(&case, 100, blocks);
    let mut effects = Vec::new();
    let mut longest = Vec::new();
    for id in 0..100 {
        let mut longest_tick = Duration::ZERO;
        let mut inbox = vec![submit(&scheduler, id, PROMPT, 8, Replica(0))];
        while !inbox.is_empty() {
            let started = Instant::now();
            scheduler.tick(0, &mut inbox, &mut effects);
            longest_tick = longest_tick.max(started.elapsed());
            complete_steps(&mut effects, &mut inbox);
        }
        assert!(scheduler.is_idle(), "the request has finished");
        longest.push(longest_tick);
    }
    longest.sort();
    longest[longest.len() / 2]
}

fn scheduler(case: &StepBenchCase, length: u32) -> Scheduler {
    scheduler_with_blocks(case, length, (case.running + 1) * length.div_ceil(BLOCK_TOKENS))
}

fn scheduler_with_blocks(case: &StepBenchCase, length: u32, blocks: u32) -> Scheduler {
    let mut limits = SchedulerLimits::cpu(length, VOCAB);
    limits.tokens_per_step = (case.running + 1).max(8_192);
    limits.max_num_seqs = case.running;
    limits.steps_in_flight = case.depth;
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
    let mut kv = KvConfig::new(spec, blocks, [1, 2]);
    kv.events = false;
    let mut config = SchedulerConfig::new(limits, kv);
    (config.replicas, config.lockstep) = (case.ranks, case.ranks > 1);
    Scheduler::new(config).expect("a valid configuration")
}

fn submit(
    scheduler: &Scheduler,
    id: u64,
    prompt_len: u32,
    max_tokens: u32,
    rank: Replica,
) -> SchedulerEvent {
    let tokens: Vec<Token> =
        (0..prompt_len).map(|i| (id as u32 * 7_919 + i * 31) % VOCAB).collect();
    let block_keys = scheduler.hasher().hash_prompt(&tokens, None);
    SchedulerEvent::Submit(Box::new(RequestSubmission {
        id: RequestId(id),
        tokens,
        max_tokens,
        sampling: SamplingParams::greedy(),
        first_masked_token: None,
        rng_key: id,
        eos_ids: vec![VOCAB - 1],
        stop_ids: Vec::new(),
        priority: 0,
        extra_keys: None,
        replica: Some(rank),
        block_keys,
    }))
}

/// Simulates the device: completes every batch immediately. Returns the number of rows in the batches.
fn complete_steps(effects: &mut Vec<SchedulerEffect>, inbox: &mut Vec<SchedulerEvent>) -> usize {
    let mut rows = 0;
    for effect in effects.drain(..) {
        let SchedulerEffect::SendBatch { replica, batch } = effect else { continue };
        rows += batch.rows.len();
        inbox.push(SchedulerEvent::StepOutput {
            replica: Replica(replica.0),
            output: step_output(&batch),
        });
    }
    rows
}

fn step_output(batch: &Batch) -> StepOutput {
    let row = |(i, row): (usize, &protocol::BatchRow)| {
        let token = (batch.step.0 as u32 * 13 + i as u32 * 7) % (VOCAB - 1);
        let sampled_tokens = if row.samples { TokenVec::one(token) } else { TokenVec::new() };
        RowOutput { sampled_tokens, ..RowOutput::default() }
    };
    let rows = batch.rows.iter().enumerate().map(row).collect();
    StepOutput {
        step: batch.step,
        epoch: batch.epoch,
        rows,
        timing: StepTiming::default(),
        expert_tokens: Vec::new(),
    }
}
