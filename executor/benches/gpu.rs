//! Benchmark of executor steps on a GPU, without scheduler and server. The models have the shapes of Qwen3 in
//! bf16 and synthetic weights.
//!
//! `cargo bench -p executor --bench gpu -- cuda|rocm 0.6b|8b|30b-a3b [KERNEL_CACHE [graphs|eager [ROWS]]]`
//! prints milliseconds per step for decode steps of several row counts, or of ROWS rows only, and the lower
//! bound on an H200: 4.29 TB/s memory bandwidth for all bytes that must be read, and 790 TFLOP/s for all
//! matrix products. Decode steps are submitted asynchronously, two in flight, as the scheduler does.
#![allow(clippy::print_stdout, reason = "the table is the result")]
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops")]

use executor::{Executor, ExecutorConfig, KvCacheSize, ModelDtype, SubmittedStep};
use models::ModelConfig;
use protocol::{
    Batch, BatchRow, BlockId, BlockTableUpdate, DeviceKind, Epoch, ExecutorSettings,
    ParallelConfig, Rank, RequestId, RowInput, SamplingParams, SequenceInit, SequenceSlot, StepId,
    StepLaunchMode, ThinVec,
};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Instant;

const BLOCK: u32 = 16;
const PROMPT: u32 = 1024;
const STEPS: u32 = 128;
const TABLE: u32 = (PROMPT + STEPS + 32).div_ceil(BLOCK);
const SEQ_SLOTS: u32 = 256;
const BYTES_PER_S: f64 = 4.29e12;
const FLOP_PER_S: f64 = 790e12;

fn main() {
    // Cargo passes the flag `--bench`. If the cargo command names no benchmark, Cargo runs every benchmark of
    // the package; this benchmark then only prints its usage.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let [device, model, rest @ ..] = &args[..] else {
        return println!(
            "usage: gpu cuda|rocm 0.6b|8b|30b-a3b [KERNEL_CACHE [graphs|eager [ROWS]]]"
        );
    };
    let shape = GpuBenchModel::named(model);
    let eager = rest.get(1).is_some_and(|how| how == "eager");
    let config = config(device, &shape, rest.first(), eager);
    let started = Instant::now();
    let mut executor = Executor::load(config, &mut |_| {}).unwrap();
    println!("{executor:?}, loaded after {:.2} s", started.elapsed().as_secs_f64());
    let memory = executor.warm_up(&mut |_| {}).unwrap();
    println!("warm after {:.2} s, {} blocks", started.elapsed().as_secs_f64(), memory.kv_blocks);
    let graphs = executor.size_kv(SEQ_SLOTS * TABLE, &mut |_| {}).unwrap().capture_sizes;
    println!("ready after {:.2} s, captured {graphs:?}", started.elapsed().as_secs_f64());
    let mut bench = GpuForwardBench { executor, model: shape, graphs, step: StepId(0) };
    println!("| step | ms | tok/s | floor ms | of floor |");
    println!("|---|---:|---:|---:|---:|");
    if let Some(rows) = rest.get(2) {
        return bench.decode(rows.parse().unwrap());
    }
    bench.prefill_and_decode();
}

/// A benchmark model: its `config.json`, and the sizes from which the lower bound of its step time is
/// computed.
struct GpuBenchModel {
    json: String,
    /// Number of parameters that every step reads, without the embedding table and the routed experts.
    dense: f64,
    experts: GpuBenchExperts,
    /// Bytes of keys and values per token, over all layers.
    kv_bytes: f64,
    /// FLOPs of attention per query-key pair, over all layers.
    attention: f64,
}

/// Expert counts and sizes of a benchmark model; all zero for a dense model.
#[derive(Clone, Copy, Default)]
struct GpuBenchExperts {
    /// Number of parameters of one expert, over all layers.
    parameters: f64,
    count: f64,
    top_k: f64,
}

impl GpuBenchModel {
    fn named(name: &str) -> Self {
        // Hidden size, intermediate size, layers, query heads, KV heads, tied embeddings.
        let (h, i, l, n, k, tied) = match name {
            "0.6b" => (1024, 3072, 28, 16, 8, true),
            "8b" => (4096, 12288, 36, 32, 8, false),
            "30b-a3b" => (2048, 6144, 48, 32, 4, false),
            _ => panic!("{name}: 0.6b, 8b or 30b-a3b"),
        };
        let moe = name == "30b-a3b";
        let experts = if moe {
            r#""model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
               "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
               "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],"#
        } else {
            r#""model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],"#
        };
        let json = format!(
            r#"{{{experts} "vocab_size": 151936, "hidden_size": {h}, "num_hidden_layers": {l},
            "num_attention_heads": {n}, "num_key_value_heads": {k}, "head_dim": 128,
            "intermediate_size": {i}, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 1000000, "max_position_embeddings": 40960,
            "tie_word_embeddings": {tied}, "attention_bias": false, "torch_dtype": "bfloat16"}}"#
        );
        let (h, i, l, n, k) =
            (f64::from(h), f64::from(i), f64::from(l), f64::from(n), f64::from(k));
        let attention = l * h * 128.0 * (2.0 * n + 2.0 * k);
        let mlp = if moe { l * h * 128.0 } else { l * 3.0 * h * i };
        Self {
            json,
            dense: attention + mlp + 151_936.0 * h,
            experts: if moe {
                GpuBenchExperts { parameters: l * 3.0 * h * 768.0, count: 128.0, top_k: 8.0 }
            } else {
                GpuBenchExperts::default()
            },
            kv_bytes: l * k * 128.0 * 2.0 * 2.0,
            attention: l * n * 128.0 * 4.0,
        }
    }

    /// Lower bound, in milliseconds, of the time of a step of `rows` rows with `tokens` new tokens each,
    /// after `context` computed tokens per row.
    fn floor_ms(&self, rows: u32, tokens: u32, context: u32) -> f64 {
        let (rows, tokens, context) = (f64::from(rows), f64::from(tokens), f64::from(context));
        let GpuBenchExperts { parameters: expert, count: experts, top_k } = self.experts;
        let all = rows * tokens;
        // Expected number of experts with at least one token, for uniform routing.
        let active_experts = experts * (1.0 - (1.0 - top_k / experts.max(1.0)).powf(all));
        let bytes = 2.0 * (self.dense + expert * active_experts)
            + self.kv_bytes * rows * (context + tokens);
        let head = 151_936.0 * (all - rows) * 2.0; // Logits are computed for the last token of each row only.
        let keys = context + f64::midpoint(tokens, 1.0);
        let flop = 2.0 * all * (self.dense + expert * top_k) - head + self.attention * all * keys;
        1e3 * (bytes / BYTES_PER_S).max(flop / FLOP_PER_S)
    }
}

fn config(
    device: &str,
    shape: &GpuBenchModel,
    cache: Option<&String>,
    eager: bool,
) -> ExecutorConfig {
    ExecutorConfig {
        environment: executor::DeviceEnvironment::default(),
        model: ModelConfig::from_json(Path::new("config.json"), &shape.json).unwrap(),
        manifest: 0,
        draft: None,
        settings: ExecutorSettings {
            model_dir: PathBuf::new(),
            draft_model_dir: None,
            config_overrides: None,
            synth_seed: Some(0),
            gpus: Vec::new(),
            device: match device {
                "cuda" => DeviceKind::Cuda,
                "rocm" => DeviceKind::Rocm,
                _ => panic!("{device}: cuda or rocm"),
            },
            libraries: None,
            kernel_cache: cache.map(PathBuf::from),
            dtype: ModelDtype::Bfloat16,
            kv_cache_dtype: executor::KvCacheDtype::Auto,
            threads: None,
            block_tokens: BLOCK,
            max_model_len: 40960,
            kv_tokens_min: TABLE * BLOCK,
            max_num_seqs: SEQ_SLOTS,
            tokens_per_step: 8192,
            kv_cache_size: KvCacheSize::Blocks(SEQ_SLOTS * TABLE),
            memory_utilization: 0.95,
            graph_capture: if eager {
                protocol::GraphCaptureConfig::Disabled
            } else {
                protocol::GraphCaptureConfig::default()
            },
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
    }
}

/// Benchmark of the steps of a GPU executor, with the row counts of its captured graphs and the id of its
/// last step.
struct GpuForwardBench {
    executor: Executor,
    model: GpuBenchModel,
    graphs: Vec<u32>,
    step: StepId,
}

impl GpuForwardBench {
    fn submit(&mut self, rows: Vec<BatchRow>) -> SubmittedStep {
        self.step = self.step.next();
        let decode = rows.iter().all(|row| row.len == 1);
        let dispatch = match self.graphs.iter().find(|&&graph| graph as usize >= rows.len()) {
            Some(&rows) if decode => StepLaunchMode::Graph { rows, width: 1 },
            _ => StepLaunchMode::Eager { tokens: rows.iter().map(|row| row.len).sum() },
        };
        let batch = Batch {
            step: self.step,
            epoch: Epoch(0),
            dispatch,
            moe_tokens: 0,
            draft_rows: 0,
            rows,
        };
        self.executor.submit(&batch).unwrap()
    }

    /// Times prefill and decode steps with several numbers of rows.
    fn prefill_and_decode(&mut self) {
        self.prefill(1);
        self.prefill(8);
        for rows in [1, 8, 16, 64, SEQ_SLOTS] {
            self.decode(rows);
        }
    }

    /// Times the prefill of `rows` prompts in one step; prints the fastest of 4 runs.
    fn prefill(&mut self, rows: u32) {
        let mut best = f64::MAX;
        for _ in 0..4 {
            let first = (0..rows).map(first_row).collect();
            let started = Instant::now();
            self.submit(first).finish().unwrap();
            best = best.min(started.elapsed().as_secs_f64());
        }
        let (name, tokens) = (format!("prefill {rows} x {PROMPT}"), rows * PROMPT);
        report(&name, best * 1e3, tokens, self.model.floor_ms(rows, PROMPT, 0));
    }

    /// Times decode steps of `rows` requests after their prompts are computed. The next step is submitted
    /// before the current one is finished.
    fn decode(&mut self, rows: u32) {
        let seq_slots: Vec<u32> = (0..rows).collect();
        for seq_slots in seq_slots.chunks(8) {
            self.submit(seq_slots.iter().copied().map(first_row).collect()).finish().unwrap();
        }
        let first: Vec<BatchRow> = (0..rows).map(|seq_slot| next_row(seq_slot, 0, None)).collect();
        let mut in_flight = VecDeque::from([self.submit(first)]);
        let mut started = Instant::now();
        for i in 1..STEPS {
            if i == 9 {
                started = Instant::now(); // Steps 1 to 8 are warm-up.
            }
            let next = (0..rows).map(|seq_slot| next_row(seq_slot, i, Some(self.step))).collect();
            let submitted = self.submit(next);
            in_flight.push_back(submitted);
            in_flight.pop_front().unwrap().finish().unwrap();
        }
        let ms = started.elapsed().as_secs_f64() * 1e3 / f64::from(STEPS - 9);
        in_flight.pop_front().unwrap().finish().unwrap();
        report(
            &format!("decode {rows}"),
            ms,
            rows,
            self.model.floor_ms(rows, 1, PROMPT + STEPS / 2),
        );
    }
}

fn report(name: &str, ms: f64, tokens: u32, floor_ms: f64) {
    let speed = f64::from(tokens) / ms * 1e3;
    println!("| {name} | {ms:.3} | {speed:.0} | {floor_ms:.3} | {:.2} |", floor_ms / ms);
}

/// Returns the first row of a request. It initialises the sequence slot and has a block table for prompt and
/// output.
fn first_row(seq_slot: u32) -> BatchRow {
    let blocks =
        (0..TABLE).map(|i| BlockId((seq_slot * TABLE + i) * 229 % (SEQ_SLOTS * TABLE))).collect();
    let init = SequenceInit {
        sampling: SamplingParams::greedy(),
        rng_key: u64::from(seq_slot),
        prompt_len: PROMPT,
        token_history: Vec::new(),
    };
    BatchRow {
        request: RequestId(u64::from(seq_slot)),
        epoch: 1,
        seq_slot: SequenceSlot(seq_slot),
        start: 0,
        len: PROMPT,
        drafts: 0,
        samples: true,
        masked: false,
        input: RowInput::Tokens(
            (0..PROMPT).map(|i| (seq_slot * 977 + i * 131) % 151_936).collect(),
        ),
        table_updates: vec![BlockTableUpdate { group: 0, first_entry: 0, blocks }].into(),
        state_slots: protocol::ThinVec::new(),
        next_token: None,
        seq_init: Some(Box::new(init)),
    }
}

fn next_row(seq_slot: u32, i: u32, sampled_at: Option<StepId>) -> BatchRow {
    let input = match sampled_at {
        Some(step) => RowInput::SampledAt { step, draft_slack: 0 },
        None => RowInput::Tokens([1].into_iter().collect()),
    };
    let (start, tables) = (PROMPT + i, ThinVec::new());
    BatchRow { start, len: 1, input, table_updates: tables, seq_init: None, ..first_row(seq_slot) }
}
