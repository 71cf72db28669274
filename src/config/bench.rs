//! Flags of `hadron bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use protocol::DeviceLibraries;

use super::engine::{DEVICE_LIBRARIES_SYNTAX, parse_device_libraries};
use super::{ClientArgs, DeviceArg, DtypeArg};

/// Benchmark to run.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// Load on any OpenAI server: latencies, throughput
    Serve(LoadArgs),
    /// The scheduler alone, on a device that takes no time
    Step(StepArgs),
    /// Single operations of a device: time, memory bandwidth, arithmetic rate
    Ops(OpsArgs),
    /// Two result files side by side
    Compare(CompareArgs),
    /// A trace of --profile in numbers: steps, gaps between them, parts of a step
    Trace(TraceArgs),
}

/// `hadron bench serve`.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Server options.
    #[command(flatten)]
    pub client: ClientArgs,
    /// Which API to use
    #[arg(long, default_value = "completions")]
    pub endpoint: LoadEndpoint,
    /// What prompts are made of
    #[arg(long, default_value = "ids")]
    pub prompts: PromptKind,
    /// Tokens of a prompt
    #[arg(long, aliases = ["isl", "random-input-len"], default_value_t = 1024,
          value_name = "TOKENS")]
    pub input_len: usize,
    /// Tokens of an answer
    #[arg(long, aliases = ["osl", "random-output-len"], default_value_t = 128,
          value_name = "TOKENS")]
    pub output_len: u32,
    /// First tokens of a prompt that all prompts share
    #[arg(long, alias = "shared", default_value_t = 0, value_name = "TOKENS")]
    pub shared_prefix: usize,
    /// Requests in flight, one run for each value
    #[arg(long, aliases = ["conc", "max-concurrency"], value_delimiter = ',',
          default_values_t = [1, 8, 64], value_name = "LIST")]
    pub concurrency: Vec<usize>,
    /// Requests of a run [default: four times its concurrency, at least 4]
    #[arg(long, value_name = "COUNT")]
    pub num_prompts: Option<usize>,
    /// Requests sent per second, at random (Poisson); without it as fast as answers come
    #[arg(long, value_name = "PER_SECOND")]
    pub request_rate: Option<f64>,
    /// Let answers end early instead of ignoring the end of text
    #[arg(long)]
    pub stop_at_eos: bool,
    /// Ids of random prompts lie below this [default: the tokenizer's, else 1000]
    #[arg(long, alias = "vocab", value_name = "COUNT")]
    pub vocab_size: Option<u32>,
    /// Folder of the tokenizer, for text prompts of an exact length
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Another seed is another set of prompts and arrival times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Requests sent before the clock starts
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    pub warmup: usize,
    /// Write results here as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// API endpoint of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadEndpoint {
    /// /v1/completions
    Completions,
    /// /v1/chat/completions
    Chat,
}

/// Content of prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PromptKind {
    /// Token ids
    Ids,
    /// Text, of an exact length where --tokenizer is given
    Text,
}

/// `hadron bench step`.
#[derive(Debug, Clone, Args)]
pub struct StepArgs {
    /// Requests running, one run for each value
    #[arg(long, value_delimiter = ',', default_values_t = [1, 256, 1024, 10_000],
          value_name = "LIST")]
    pub running: Vec<u32>,
    /// Tokens of each prompt
    #[arg(long, alias = "isl", default_value_t = 128, value_name = "TOKENS")]
    pub input_len: u32,
    /// Steps measured at each
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    pub steps: u32,
    /// Tokens per KV block
    #[arg(long, default_value_t = 16, value_name = "TOKENS")]
    pub block_size: u32,
    /// Write results here as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// `hadron bench ops`.
#[derive(Debug, Clone, Args)]
pub struct OpsArgs {
    /// A model folder or a hub id whose shapes are used; its weights are not read [default: the shapes of
    /// Qwen3-0.6B]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// What to compute on; auto takes a GPU if there is one, else the CPU
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Device libraries by path, as for hadron serve
    #[arg(long, hide = true, value_parser = parse_device_libraries, value_name = DEVICE_LIBRARIES_SYNTAX)]
    pub device_libraries: Option<DeviceLibraries>,
    /// Index of the GPU
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub device_id: u32,
    /// Threads of the CPU backend [default: the physical cores]
    #[arg(long, value_name = "COUNT")]
    pub threads: Option<u32>,
    /// Type of the weights and activations; auto takes what config.json says
    #[arg(long, default_value = "auto")]
    pub dtype: DtypeArg,
    /// Tokens per launch, one measurement for each value; the rows of a decode step, or one prompt
    #[arg(long, alias = "batch-size", value_delimiter = ',', default_values_t = [1, 8, 64, 512],
          value_name = "LIST")]
    pub tokens: Vec<u32>,
    /// Keys that each row of a decode step attends to
    #[arg(long, default_value_t = 1024, value_name = "TOKENS")]
    pub context: u32,
    /// Tokens per KV block
    #[arg(long, default_value_t = 16, value_name = "TOKENS")]
    pub block_size: u32,
    /// Timed runs of each op; the table has their median and their fastest
    #[arg(long, default_value_t = 7, value_name = "COUNT")]
    pub repeats: u32,
    /// Ops to time, by name [default: all that the model has]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub only: Vec<String>,
    /// Write results here as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// `hadron bench compare`.
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// Results to compare with
    pub before: PathBuf,
    /// Results to judge
    pub after: PathBuf,
    /// Exit with 1 if a figure is worse by more than this many percent
    #[arg(long, value_name = "PERCENT")]
    pub fail_above: Option<f64>,
}

/// `hadron bench trace`.
#[derive(Debug, Clone, Args)]
pub struct TraceArgs {
    /// A file that hadron serve --profile DIR wrote
    pub file: PathBuf,
}
