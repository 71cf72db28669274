//! Flags of `hadron bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use protocol::DeviceLibraries;

use super::engine::{DEVICE_LIBRARIES_SYNTAX, parse_device_libraries};
use super::{DeviceArg, DtypeArg, EvalClientArgs};

/// Benchmark that `hadron bench` runs.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// Load test of an OpenAI-compatible server: latencies, throughput
    Serve(BenchServeArgs),
    /// Scheduler benchmark with a simulated device
    Step(BenchStepArgs),
    /// Benchmark of single ops of a device: time, memory bandwidth, FLOP rate
    Ops(BenchOpsArgs),
    /// Compare two result files
    Compare(BenchCompareArgs),
    /// Summarise a trace of --profile: step times, gaps between steps, time per kernel family
    Trace(BenchTraceArgs),
}

/// Arguments of `hadron bench serve`.
#[derive(Debug, Clone, Args)]
pub struct BenchServeArgs {
    /// Server to connect to.
    #[command(flatten)]
    pub client: EvalClientArgs,
    /// API endpoint of the requests
    #[arg(long, default_value = "completions")]
    pub endpoint: BenchServeEndpoint,
    /// Content of prompts
    #[arg(long, default_value = "ids")]
    pub prompts: PromptKind,
    /// Tokens per prompt
    #[arg(long, aliases = ["isl", "random-input-len"], default_value_t = 1024,
          value_name = "TOKENS")]
    pub input_len: usize,
    /// Tokens per output
    #[arg(long, aliases = ["osl", "random-output-len"], default_value_t = 128,
          value_name = "TOKENS")]
    pub output_len: u32,
    /// Prefix length that all prompts share
    #[arg(long, alias = "shared", default_value_t = 0, value_name = "TOKENS")]
    pub shared_prefix: usize,
    /// Concurrent requests, one run per value
    #[arg(long, aliases = ["conc", "max-concurrency"], value_delimiter = ',',
          default_values_t = [1, 8, 64], value_name = "LIST")]
    pub concurrency: Vec<usize>,
    /// Requests per run [default: four times the concurrency, at least 4]
    #[arg(long, value_name = "COUNT")]
    pub num_prompts: Option<usize>,
    /// Request rate with Poisson arrivals [default: limited by the concurrency only]
    #[arg(long, value_name = "PER_SECOND")]
    pub request_rate: Option<f64>,
    /// Stop at end-of-text tokens instead of ignoring them
    #[arg(long)]
    pub stop_at_eos: bool,
    /// Vocabulary size for random token ids [default: of the tokenizer or of the server's model folder, else
    /// 500]
    #[arg(long, alias = "vocab", value_name = "COUNT")]
    pub vocab_size: Option<u32>,
    /// Tokenizer folder, for text prompts of an exact length
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Random seed of prompts and arrival times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Warm-up requests before the measurement
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    pub warmup: usize,
    /// Write results to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// API endpoint that `hadron bench serve` sends requests to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchServeEndpoint {
    /// Completions endpoint, /v1/completions
    Completions,
    /// Chat endpoint, /v1/chat/completions
    Chat,
}

/// Kind of prompts that a load generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PromptKind {
    /// Random token ids
    Ids,
    /// Text, of an exact length if --tokenizer is given
    Text,
}

/// Arguments of `hadron bench step`.
#[derive(Debug, Clone, Args)]
pub struct BenchStepArgs {
    /// Running requests, one run per value
    #[arg(long, value_delimiter = ',', default_values_t = [1, 256, 1024, 10_000],
          value_name = "LIST")]
    pub running: Vec<u32>,
    /// Tokens per prompt
    #[arg(long, alias = "isl", default_value_t = 128, value_name = "TOKENS")]
    pub input_len: u32,
    /// Measured steps per run
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    pub steps: u32,
    /// Tokens per KV block
    #[arg(long, default_value_t = 16, value_name = "TOKENS")]
    pub block_size: u32,
    /// Write results to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `hadron bench ops`.
#[derive(Debug, Clone, Args)]
pub struct BenchOpsArgs {
    /// Model folder or hub id that provides the shapes; weights are not read, and windows, sinks, biases of experts,
    /// gate activations other than SiLU, gated delta nets and output gates are not measured [default: Qwen3-0.6B]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Device; auto selects a GPU if there is one, else the CPU
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Paths of device libraries, as for hadron serve
    #[arg(long, hide = true, value_parser = parse_device_libraries, value_name = DEVICE_LIBRARIES_SYNTAX)]
    pub device_libraries: Option<DeviceLibraries>,
    /// GPU index
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub device_id: u32,
    /// Threads of the CPU backend [default: number of physical cores]
    #[arg(long, value_name = "COUNT")]
    pub threads: Option<u32>,
    /// Data type of weights and activations; auto selects that of config.json
    #[arg(long, default_value = "auto")]
    pub dtype: DtypeArg,
    /// Tokens per launch, one measurement per value: rows of a decode step, or one prompt
    #[arg(long, alias = "batch-size", value_delimiter = ',', default_values_t = [1, 8, 64, 512],
          value_name = "LIST")]
    pub tokens: Vec<u32>,
    /// Context length of each row of a decode step
    #[arg(long, default_value_t = 1024, value_name = "TOKENS")]
    pub context: u32,
    /// Tokens per KV block
    #[arg(long, default_value_t = 16, value_name = "TOKENS")]
    pub block_size: u32,
    /// Measured runs per op; the table shows the median and the fastest
    #[arg(long, default_value_t = 7, value_name = "COUNT")]
    pub repeats: u32,
    /// Ops to measure, by name [default: all ops of the model]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub only: Vec<String>,
    /// Write results to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `hadron bench compare`.
#[derive(Debug, Clone, Args)]
pub struct BenchCompareArgs {
    /// Baseline results
    pub before: PathBuf,
    /// New results
    pub after: PathBuf,
    /// Exit with 1 if a metric is worse by more than this percentage
    #[arg(long, value_name = "PERCENT")]
    pub fail_above: Option<f64>,
}

/// Arguments of `hadron bench trace`.
#[derive(Debug, Clone, Args)]
pub struct BenchTraceArgs {
    /// Trace file written by hadron serve --profile DIR
    pub file: PathBuf,
}
