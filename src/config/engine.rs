//! Flags of the scheduler, the KV cache and the executors.

mod device_flags;
mod parallel;

pub use device_flags::DeviceArg;
pub(super) use device_flags::{DEVICE_LIBRARIES_SYNTAX, parse_device_libraries};
pub use parallel::ParallelArgs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use protocol::DeviceLibraries;

use super::units::{ByteSize, DurationArg, tokens};
use super::{CommandLineError, DtypeArg, rejected};

/// Flags of the device, the KV cache, the scheduler and the executors.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Device; auto selects a GPU if one can be opened, else the CPU
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Paths of device libraries instead of the system's: driver, run-time compiler, BLAS, warp size if they
    /// emulate a GPU, RCCL or NCCL
    #[arg(long, hide = true, value_parser = parse_device_libraries, value_name = DEVICE_LIBRARIES_SYNTAX)]
    pub device_libraries: Option<DeviceLibraries>,
    /// Threads of the CPU backend [default: number of physical cores]
    #[arg(long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Tokens per KV block
    #[arg(long, alias = "page-size", default_value_t = 16, value_name = "TOKENS")]
    pub block_size: u32,
    /// Bytes of the KV cache [default on the CPU: the lesser of 4 GiB and a quarter of the free memory; on a
    /// GPU: from --gpu-memory-utilization]
    #[arg(long, value_name = "BYTES")]
    pub kv_cache_memory_bytes: Option<ByteSize>,
    /// Exact number of KV blocks; overrides every other size
    #[arg(long, value_name = "BLOCKS")]
    pub num_gpu_blocks_override: Option<u32>,
    /// Fraction of a GPU's memory to use; has no effect on the CPU, where the KV cache is sized in bytes
    #[arg(long, aliases = ["mem-fraction-static", "device-memory-utilization"], default_value_t = 0.90,
          value_name = "FRACTION")]
    pub gpu_memory_utilization: f64,
    /// Data type of the KV cache; auto selects that of the activations, fp8 uses one byte per value
    #[arg(long, default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtypeArg,
    /// Share KV blocks of equal prompt prefixes
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enable_prefix_caching: bool,
    /// Maximum running requests per replica [default: 512; 128 for models with recurrent state, which takes memory for
    /// each of them]
    #[arg(long, alias = "max-running-requests", value_name = "COUNT")]
    pub max_num_seqs: Option<u32>,
    /// Maximum tokens of a step [default: 512 on the CPU, 8192 on a GPU]
    #[arg(long, alias = "chunked-prefill-size", value_parser = tokens, value_name = "TOKENS")]
    pub max_num_batched_tokens: Option<u32>,
    /// Maximum tokens of a prefill chunk; 0 = limited by the step only
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub long_prefill_token_threshold: u32,
    /// Target duration of a step in milliseconds while requests are decoding: prefill chunks are shortened to meet it, to at least
    /// one chunk quantum of 64 tokens per step, which lowers the inter-token latency; 0 = no limit
    #[arg(long, default_value_t = 0, value_name = "MS")]
    pub max_step_ms: u32,
    /// Distance in tokens of the checkpoints of recurrent state, which prefix hits need; 0 = only at the end of prompts
    /// and where prefix hits were shortened
    #[arg(long, default_value_t = 8192, value_name = "TOKENS")]
    pub state_checkpoint_interval_tokens: u32,
    /// Waiting and running requests beyond which new ones are rejected [default: max-num-seqs + 1024 per
    /// replica; with --runner pooling, max-num-seqs + 8192]
    #[arg(long, alias = "max-queued-requests", value_name = "COUNT")]
    pub max_num_queued_reqs: Option<u32>,
    /// Prompt tokens waiting for prefill beyond which new requests are rejected [default: no limit]
    #[arg(long, value_parser = tokens, value_name = "TOKENS")]
    pub max_num_queued_tokens: Option<u32>,
    /// Memory of received and queued requests beyond which new ones are rejected
    #[arg(long, default_value = "1GiB", value_name = "BYTES")]
    pub max_queued_bytes: ByteSize,
    /// Memory limit for tokenizing texts that cannot be tokenized in parts, over all requests
    #[arg(long, default_value = "1536MiB", value_name = "BYTES")]
    pub max_text_memory: ByteSize,
    /// HTTP status of requests rejected under overload
    #[arg(long, default_value = "429", value_name = "STATUS")]
    pub admission_status: OverloadHttpStatus,
    /// Scheduling order of waiting requests
    #[arg(long, default_value = "fcfs")]
    pub scheduling_policy: SchedulingPolicyArg,
    /// Disable graph capture (the CPU captures no graphs)
    #[arg(long, alias = "disable-cuda-graph", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value_t = false,
          action = clap::ArgAction::Set, value_name = "BOOL")]
    pub enforce_eager: bool,
    /// Row counts of the decode steps captured as CUDA graphs or HIP graphs [default: derived from --max-num-seqs]
    #[arg(long, alias = "cuda-graph-bs", num_args = 1.., value_delimiter = ',', value_name = "ROWS")]
    pub cudagraph_capture_sizes: Vec<u32>,
    /// Maximum rows of a captured decode step
    #[arg(long, alias = "cuda-graph-max-bs", value_name = "ROWS")]
    pub max_cudagraph_capture_size: Option<u32>,
    /// GPU indices of the executors, one each, among the visible GPUs [default: the first ones]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "INDEX")]
    pub device_ids: Vec<u32>,
    /// Mix decode rows and prefill chunks in one step; disable for comparison only
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub mixed: bool,
    /// Placement of the executor; on a GPU it is always a separate process
    #[arg(long, default_value = "embedded")]
    pub executor: ExecutorModeArg,
    /// Time after which a step is overdue [default: the greater of 5 s and ten times its expected duration]
    #[arg(long, alias = "watchdog-timeout", value_name = "SECONDS")]
    pub step_deadline: Option<DurationArg>,
    /// Write traces of the executors' steps to this folder once the server is ready; see /start_profile
    #[arg(long, value_name = "DIR")]
    pub profile: Option<PathBuf>,
    /// Timeout of an executor's start
    #[arg(long, default_value = "600s", value_name = "SECONDS")]
    pub startup_timeout: DurationArg,
    /// Failures of a replica's serving executors within ten minutes that are followed by a restart; one more
    /// ends the server
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    pub max_executor_restarts: u32,
    /// First back-off after a restart that fails before the executors are ready; doubles with each further
    /// failure
    #[arg(long, default_value = "500ms", value_name = "SECONDS")]
    pub restart_backoff: DurationArg,
    /// Maximum back-off between failed restarts
    #[arg(long, default_value = "30s", value_name = "SECONDS")]
    pub restart_backoff_max: DurationArg,
    /// Time for which failed restarts are repeated, at least three times, before the server ends
    #[arg(long, default_value = "300s", value_name = "SECONDS")]
    pub restart_give_up: DurationArg,
    /// Random seed of synthetic weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Data type of the keys and values in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtypeArg {
    /// Same data type as the activations
    Auto,
    /// bfloat16, 16 bits per value
    #[value(alias = "bfloat16")]
    Bf16,
    /// FP8 (e4m3), 8 bits per value
    #[value(alias = "fp8_e4m3")]
    Fp8,
}

impl KvCacheDtypeArg {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bf16 => "bfloat16",
            Self::Fp8 => "fp8",
        }
    }
}

/// HTTP status of requests that are rejected because the server is overloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OverloadHttpStatus {
    /// Status 429, Too Many Requests
    #[value(name = "429")]
    TooManyRequests,
    /// Status 503, Service Unavailable
    #[value(name = "503")]
    ServiceUnavailable,
}

/// Order in which waiting requests are scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SchedulingPolicyArg {
    /// Requests are scheduled in the order of their arrival
    Fcfs,
    /// Requests with a lower `priority` value are scheduled first
    Priority,
}

/// Policy that selects the replica for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadBalancePolicy {
    /// Select the replica with the fewest requests
    #[value(name = "least_requests", alias = "least-requests")]
    LeastRequests,
    /// Select the replica with the fewest tokens
    #[value(name = "least_tokens", alias = "least-tokens")]
    LeastTokens,
    /// Select the replica with the fewest tokens to compute; tokens of prefix hits are not counted
    Prefix,
    /// Select the replicas one after the other
    #[value(name = "round_robin", alias = "round-robin")]
    RoundRobin,
}

/// Whether the executor runs as a thread of the server or as a separate process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExecutorModeArg {
    /// The executor is a thread of the server
    Embedded,
    /// The executor is a separate process
    Process,
}

/// Default maximum tokens of a step on the CPU: a compromise between efficient GEMMs and the latency of
/// decode rows.
const CPU_TOKENS_PER_STEP: u32 = 512;
/// Default maximum tokens of a step on a GPU.
const GPU_TOKENS_PER_STEP: u32 = 8192;

/// Error message for a bfloat16 KV cache of a model with another data type.
pub(crate) const BF16_KV_CACHE_MISMATCH: &str = "--kv-cache-dtype bf16: a KV cache \
     without fp8 has the data type of the activations, which is not bfloat16; use --dtype bfloat16";

/// Default of `--max-num-seqs`.
const MAX_NUM_SEQS: u32 = 512;
/// Default of `--max-num-seqs` for models with recurrent state. States of Qwen3-Next take 79 MB per request.
const MAX_NUM_SEQS_RECURRENT: u32 = 128;

impl EngineArgs {
    /// Returns the maximum tokens of a step: `--max-num-batched-tokens`, or the default of the device.
    pub fn tokens_per_step(&self) -> u32 {
        self.max_num_batched_tokens.unwrap_or(match self.device {
            DeviceArg::Auto | DeviceArg::Cpu => CPU_TOKENS_PER_STEP,
            DeviceArg::Rocm | DeviceArg::Cuda => GPU_TOKENS_PER_STEP,
        })
    }

    /// Returns the maximum number of running requests per replica.
    pub fn max_num_seqs(&self) -> u32 {
        self.max_num_seqs.unwrap_or(MAX_NUM_SEQS)
    }

    /// Sets the maximum number of running requests to the default of the model, if it is not configured.
    /// `is_recurrent`: whether the model has recurrent state.
    pub fn set_default_max_num_seqs(&mut self, is_recurrent: bool) {
        let default = if is_recurrent { MAX_NUM_SEQS_RECURRENT } else { MAX_NUM_SEQS };
        self.max_num_seqs.get_or_insert(default);
    }

    /// Returns the maximum tokens of a prefill chunk; `None` = limited by the tokens of the step only.
    pub fn tokens_per_chunk(&self) -> Option<u32> {
        (self.long_prefill_token_threshold > 0).then_some(self.long_prefill_token_threshold)
    }

    /// Returns the time budget of a step in milliseconds; `None` = no limit.
    pub fn max_step_ms(&self) -> Option<u32> {
        (self.max_step_ms > 0).then_some(self.max_step_ms)
    }

    /// Returns the number of waiting and running requests at which further requests are rejected;
    /// `waiting_default` is the default number of waiting requests per replica.
    pub fn requests_in_flight_max(&self, replicas: u16, waiting_default: u32) -> u32 {
        let default = u32::from(replicas) * (self.max_num_seqs() + waiting_default);
        self.max_num_queued_reqs.unwrap_or(default)
    }

    /// Returns the bytes of the KV cache on a CPU host with `free_bytes` bytes of free memory.
    pub fn kv_bytes(&self, free_bytes: u64) -> u64 {
        let default = (4_u64 << 30).min(free_bytes / 4);
        self.kv_cache_memory_bytes.map_or(default, |size| size.0)
    }

    /// Rejects counts that are 0.
    fn check_counts(&self) -> Result<(), CommandLineError> {
        let positive = [
            ("--block-size", self.block_size),
            ("--max-num-seqs", self.max_num_seqs()),
            ("--max-num-batched-tokens", self.tokens_per_step()),
            ("--max-num-queued-reqs", self.max_num_queued_reqs.unwrap_or(1)),
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override.unwrap_or(1)),
        ];
        for (name, value) in positive {
            if value == 0 {
                return rejected(format!("{name} 0: at least 1"));
            }
        }
        Ok(())
    }

    /// Rejects invalid values of the flags.
    pub(super) fn check(&self, dtype: DtypeArg) -> Result<(), CommandLineError> {
        let is_not_bf16 = matches!(dtype, DtypeArg::Float32 | DtypeArg::Float16);
        if self.kv_cache_dtype == KvCacheDtypeArg::Bf16 && is_not_bf16 {
            return rejected(BF16_KV_CACHE_MISMATCH);
        }
        self.check_graphs()?;
        self.check_counts()?;
        if !self.block_size.is_multiple_of(2) {
            return rejected(format!("--block-size {}: an even number of tokens", self.block_size));
        }
        if self.threads == Some(0) {
            return rejected("--threads 0: at least 1");
        }
        let backoff = RESTART_BACKOFF_MIN..=self.restart_backoff_max.0;
        if !backoff.contains(&self.restart_backoff.0) {
            let Self { restart_backoff: first, restart_backoff_max: max, .. } = self;
            return rejected(format!(
                "--restart-backoff {first}: at least 10ms and at most --restart-backoff-max, which is {max}"
            ));
        }
        if !(self.gpu_memory_utilization > 0.0 && self.gpu_memory_utilization <= 1.0) {
            return rejected("--gpu-memory-utilization: above 0 and at most 1");
        }
        Ok(())
    }

    fn check_graphs(&self) -> Result<(), CommandLineError> {
        let sizes = &self.cudagraph_capture_sizes;
        if sizes.contains(&0) || self.max_cudagraph_capture_size == Some(0) {
            return rejected(
                "--cudagraph-capture-sizes, --max-cudagraph-capture-size: at least 1; --enforce-eager captures none",
            );
        }
        let largest = sizes.iter().max();
        if let (Some(max), Some(&largest)) = (self.max_cudagraph_capture_size, largest)
            && max != largest
        {
            return rejected(format!(
                "--max-cudagraph-capture-size {max}: the largest of --cudagraph-capture-sizes is {largest}; use one of the two flags"
            ));
        }
        let mut ids = self.device_ids.clone();
        ids.sort_unstable();
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(twice) => rejected(format!("--device-ids: {} is given twice", twice[0])),
            None => Ok(()),
        }
    }
}

/// Minimum back-off between restarts, so that executors that fail immediately are not restarted in a busy
/// loop.
const RESTART_BACKOFF_MIN: Duration = Duration::from_millis(10);
