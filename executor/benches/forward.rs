//! Benchmark of executor steps on the CPU, without scheduler and server. The model has the shapes of
//! Qwen3-0.6B in bf16 and synthetic weights.
//!
//! `cargo bench -p executor --bench forward -- [THREADS [CASE]]` prints the tokens per second of each case
//! and, in column `floor`, the tokens per second at the hardware limit of two cores of the reference machine:
//! 469 GFLOP/s of bf16 matrix products and 37 GB/s of memory bandwidth. Prefill is one row; a decode step has
//! one token per row, with contexts below 50 tokens.
#![allow(clippy::print_stdout, reason = "the table is the result")]
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops")]

use executor::{Executor, ExecutorConfig, KvCacheSize, ModelDtype};
use models::ModelConfig;
use protocol::{
    Batch, BatchRow, BlockId, BlockTableUpdate, Epoch, ExecutorSettings, ParallelConfig, Rank,
    RequestId, RowInput, SamplingParams, SequenceInit, SequenceSlot, StepId, StepLaunchMode,
    StepTiming, ThinVec, Token,
};
use std::path::{Path, PathBuf};
use std::time::Instant;

const QWEN3_0_6B: &str = r#"{
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
    "tie_word_embeddings": true, "attention_bias": false, "torch_dtype": "bfloat16"
}"#;

const BLOCK: u32 = 16;
const TABLE: u32 = 512 / BLOCK;
const PROMPT: u32 = 8;

fn main() {
    // Cargo passes the flag `--bench` to the benchmark executable.
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let threads = args.next().and_then(|arg| arg.parse().ok());
    let only = args.next();
    let is_selected = |name: &str| only.as_ref().is_none_or(|only| only == name);
    let config = ExecutorConfig {
        environment: executor::DeviceEnvironment::default(),
        model: ModelConfig::from_json(Path::new("config.json"), QWEN3_0_6B).unwrap(),
        manifest: 0,
        draft: None,
        settings: ExecutorSettings {
            model_dir: PathBuf::new(),
            draft_model_dir: None,
            config_overrides: None,
            synth_seed: Some(0),
            device: protocol::DeviceKind::Cpu,
            gpus: Vec::new(),
            libraries: None,
            kernel_cache: None,
            dtype: ModelDtype::Bfloat16,
            kv_cache_dtype: executor::KvCacheDtype::Auto,
            threads,
            block_tokens: BLOCK,
            max_model_len: 512,
            kv_tokens_min: 512,
            max_num_seqs: 32,
            tokens_per_step: 512,
            kv_cache_size: KvCacheSize::Blocks(32 * TABLE),
            memory_utilization: 0.9,
            graph_capture: protocol::GraphCaptureConfig::default(),
            speculative: None,
            max_logprobs: 20,
            profile_dir: None,
            epoch: Epoch(0),
            rank: Rank(0),
            parallel: ParallelConfig::default(),
            ranks_on_host: 1,
            expert_placement: None,
            one_shot_all_reduce: true,
            host_address: None,
            rendezvous: None,
        },
    };
    let started = Instant::now();
    let mut executor = Executor::load(config, &mut |_| {}).unwrap();
    println!("{executor:?}, loaded in {:.1} s", started.elapsed().as_secs_f64());
    let started = Instant::now();
    executor.warm_up(&mut |_| {}).unwrap();
    println!("warm-up {:.1} s", started.elapsed().as_secs_f64());
    executor.size_kv(32 * TABLE, &mut |_| {}).unwrap();
    let mut bench = CpuForwardBench { executor, step: StepId(0) };
    println!(
        "| step | ms p50 | best | inputs | forward | sample | tok/s | floor | of floor | tok/s mean |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    if is_selected("prefill 512") {
        let steps = (0..3).map(|_| bench.prefill(512)).collect();
        report("prefill 512", 512.0, 470.0, steps);
    }
    let random = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
    let nucleus = SamplingParams { top_p: 0.9, ..random.clone() };
    for (name, rows, floor, sampling) in [
        ("decode 1", 1, 31.0, SamplingParams::greedy()),
        ("decode 8", 8, 222.0, SamplingParams::greedy()),
        ("decode 16", 16, 295.0, SamplingParams::greedy()),
        ("decode 32", 32, 333.0, SamplingParams::greedy()),
        ("decode 32, temperature 1", 32, 333.0, random),
        ("decode 32, top-p 0.9", 32, 333.0, nucleus),
    ] {
        if is_selected(name) {
            report(name, f64::from(rows), floor, bench.decode(rows, &sampling));
        }
    }
}

/// Prints a table line for the median step. The last column is the token rate of the whole run (all tokens
/// divided by the time of all steps), for comparison with benchmarks that report only this rate.
fn report(name: &str, tokens: f64, floor: f64, mut steps: Vec<MeasuredStep>) {
    steps.sort_by_key(|step| step.ns);
    let MeasuredStep { ns, timing } = steps[steps.len() / 2];
    let ms = |ns: u64| ns as f64 * 1e-6;
    let speed = tokens / (ns as f64 * 1e-9);
    let total_ns: u64 = steps.iter().map(|step| step.ns).sum();
    let mean_speed = tokens * steps.len() as f64 / (total_ns as f64 * 1e-9);
    println!(
        "| {name} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {speed:.1} | {floor} | {:.2} | {mean_speed:.1} |",
        ms(ns),
        ms(steps[0].ns),
        ms(timing.inputs_ns),
        ms(timing.forward_ns),
        ms(timing.sample_ns),
        speed / floor,
    );
}

/// Duration of a step in nanoseconds, and the parts of it that the executor reports.
#[derive(Clone, Copy)]
struct MeasuredStep {
    ns: u64,
    timing: StepTiming,
}

/// Benchmark of the steps of a CPU executor, with the id of its last step.
struct CpuForwardBench {
    executor: Executor,
    step: StepId,
}

/// Measured times and sampled tokens of a finished step.
struct ForwardBenchStepResult {
    /// Total time of the step in nanoseconds.
    ns: u64,
    timing: StepTiming,
    /// Sampled tokens.
    tokens: Vec<Token>,
}

impl CpuForwardBench {
    fn step(&mut self, rows: Vec<BatchRow>) -> ForwardBenchStepResult {
        self.step = self.step.next();
        let dispatch = StepLaunchMode::Eager { tokens: rows.iter().map(|row| row.len).sum() };
        let batch = Batch {
            step: self.step,
            epoch: Epoch(0),
            dispatch,
            moe_tokens: 0,
            draft_rows: 0,
            rows,
        };
        let started = Instant::now();
        let output = self.executor.step(&batch).unwrap();
        let ns = started.elapsed().as_nanos() as u64;
        let tokens = output.rows.iter().map(|row| row.sampled_tokens[0]).collect();
        ForwardBenchStepResult { ns, timing: output.timing, tokens }
    }

    fn prefill(&mut self, len: u32) -> MeasuredStep {
        let row = first_row(0, len, &SamplingParams::greedy());
        let ForwardBenchStepResult { ns, timing, .. } = self.step(vec![row]);
        MeasuredStep { ns, timing }
    }

    /// Runs decode steps of `rows` requests, from a short prompt up to a context just below 50 tokens.
    fn decode(&mut self, rows: u32, sampling: &SamplingParams) -> Vec<MeasuredStep> {
        let first = (0..rows).map(|seq_slot| first_row(seq_slot, PROMPT, sampling)).collect();
        let mut tokens = self.step(first).tokens;
        let mut steps = Vec::new();
        for start in PROMPT..49 {
            let next = (0..).zip(&tokens).map(|(seq_slot, token)| BatchRow {
                start,
                len: 1,
                input: RowInput::Tokens(vec![*token].into()),
                table_updates: ThinVec::new(),
                seq_init: None,
                ..first_row(seq_slot, 1, sampling)
            });
            let step = self.step(next.collect());
            tokens = step.tokens;
            steps.push(MeasuredStep { ns: step.ns, timing: step.timing });
        }
        steps
    }
}

/// Returns the first row of a request. It initialises the sequence slot and has a block table for 512 tokens.
fn first_row(seq_slot: u32, len: u32, sampling: &SamplingParams) -> BatchRow {
    let blocks = (seq_slot * TABLE..(seq_slot + 1) * TABLE).map(BlockId).collect();
    let key = u64::from(seq_slot);
    let init = SequenceInit {
        sampling: sampling.clone(),
        rng_key: key,
        prompt_len: len,
        token_history: Vec::new(),
    };
    BatchRow {
        request: RequestId(key),
        epoch: 1,
        seq_slot: SequenceSlot(seq_slot),
        start: 0,
        len,
        drafts: 0,
        samples: true,
        masked: false,
        input: RowInput::Tokens((0..len).map(|i| (seq_slot * 977 + i * 131) % 151_936).collect()),
        table_updates: vec![BlockTableUpdate { group: 0, first_entry: 0, blocks }].into(),
        state_slots: protocol::ThinVec::new(),
        next_token: None,
        seq_init: Some(Box::new(init)),
    }
}
