//! Settings of an executor process, sent before any other message.

use crate::{Epoch, Rank};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Settings of an executor process; the executor reads the model folder itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutorSettings {
    /// Model folder.
    pub model_dir: PathBuf,
    /// Folder of the draft model, if any.
    pub draft_model_dir: Option<PathBuf>,
    /// Overrides of the model's `config.json`: a JSON object.
    pub config_overrides: Option<String>,
    /// Seed of synthetic weights; `None` = weights of the model folder.
    pub synth_seed: Option<u64>,
    /// Compute device.
    pub device: DeviceKind,
    /// GPU index of each rank of this host, in the order of the driver; empty = the position of the rank on its host.
    pub gpus: Vec<u32>,
    /// Paths of device libraries; `None` = system libraries.
    pub libraries: Option<DeviceLibraries>,
    /// Cache folder of compiled kernels; `None` = no cache.
    pub kernel_cache: Option<PathBuf>,
    /// Data type of weights and activations.
    pub dtype: ModelDtype,
    /// Data type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Number of CPU compute threads; `None` = one per physical core.
    pub threads: Option<u32>,
    /// Token positions per KV block.
    pub block_tokens: u32,
    /// Maximum length of a request in tokens, prompt and output.
    pub max_model_len: u32,
    /// Minimum number of token positions in the KV cache; the executor fails to start with a smaller KV
    /// cache.
    pub kv_tokens_min: u32,
    /// Number of sequence slots: maximum number of running requests.
    pub max_num_seqs: u32,
    /// Maximum number of tokens per step.
    pub tokens_per_step: u32,
    /// Size of the KV cache.
    pub kv_cache_size: KvCacheSize,
    /// Fraction of GPU memory to use, including weights.
    pub memory_utilization: f64,
    /// Graphs to capture, if the device supports graphs.
    pub graph_capture: GraphCaptureConfig,
    /// Speculative decoding; `None` = off.
    pub speculative: Option<SpeculativeConfig>,
    /// Maximum number of logprobs per token in a request (`--max-logprobs`).
    pub max_logprobs: u32,
    /// Folder for traces of the executor's steps; `None` = no traces.
    pub profile_dir: Option<PathBuf>,
    /// Epoch of the executor group (a number that increases when the executors are restarted); batches of
    /// other epochs are dropped.
    pub epoch: Epoch,
    /// World rank, the rank among all ranks of the server: `dp · tp_size + tp`.
    pub rank: Rank,
    /// Parallel configuration of the server.
    pub parallel: ParallelConfig,
    /// Number of ranks on each host; the ranks of a host are consecutive, and share the cores and memory of the host.
    pub ranks_on_host: u16,
    /// Expert placement; `None` = each expert once, in order.
    pub expert_placement: Option<ExpertPlacement>,
    /// Name or address at which ranks on other hosts reach this host; `None` = the ranks of each group are on one host.
    pub host_address: Option<String>,
    /// Rendezvous of the ranks of a host: a file of shared memory that every rank maps; `None` = single rank.
    pub rendezvous: Option<PathBuf>,
    /// Whether GPUs with peer access use the one-shot all-reduce for small tensors; otherwise all tensors use
    /// RCCL or NCCL.
    pub one_shot_all_reduce: bool,
}

/// Parallel configuration of a server. The world is the set of all ranks of the server; the ranks of a
/// replica are consecutive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParallelConfig {
    /// Number of tensor-parallel ranks per replica.
    pub tp_size: u16,
    /// Number of replicas, each with its own KV cache.
    pub dp_size: u16,
    /// Expert parallelism: each expert is on one rank of the server, instead of sharded over all ranks of a
    /// replica.
    pub expert_parallel: bool,
}

impl Default for ParallelConfig {
    /// Returns the configuration of a single rank.
    fn default() -> Self {
        Self { tp_size: 1, dp_size: 1, expert_parallel: false }
    }
}

impl ParallelConfig {
    /// Returns the world size: the number of ranks of the server.
    #[must_use]
    pub fn world_size(self) -> u16 {
        self.tp_size * self.dp_size
    }

    /// Returns whether replicas step together, because they share experts.
    #[must_use]
    pub fn lockstep(self) -> bool {
        self.expert_parallel && self.dp_size > 1
    }

    /// Number of ranks that communicate in steps: those of a replica, or of all replicas that step together.
    #[must_use]
    pub fn ranks_per_group(self) -> u16 {
        if self.lockstep() { self.world_size() } else { self.tp_size }
    }
}

/// Configuration of speculative decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeculativeConfig {
    /// Maximum number of draft tokens per row.
    pub draft_tokens: u8,
    /// Proposer of the draft tokens.
    pub method: SpeculativeMethod,
    /// Rule that decides which draft tokens are accepted.
    pub acceptance: DraftAcceptanceRule,
}

/// Rule that decides which draft tokens are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DraftAcceptanceRule {
    /// Accepts a draft token if it equals the token that would be sampled without draft tokens.
    #[default]
    Exact,
    /// For benchmarks: accepts draft tokens with fixed probabilities, regardless of the model. The output is
    /// meaningless.
    Synthetic {
        /// Acceptance probability of the first draft token of a row in thousandths; values of 1000 and more
        /// mean certain acceptance.
        per_mille: u16,
        /// Amount in thousandths that is subtracted from the acceptance probability for each further draft
        /// token of the row: 0 for a constant probability, 1000 for a fixed mean number of accepted draft
        /// tokens.
        decrease: u16,
    },
}

/// Proposer of draft tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpeculativeMethod {
    /// N-gram lookup: proposes the tokens that followed an earlier occurrence of the request's newest tokens.
    /// Needs [`SequenceInit::token_history`](crate::SequenceInit) of every request.
    Ngram {
        /// Minimum n-gram length, at least 1.
        lookup_min: u8,
        /// Maximum n-gram length.
        lookup_max: u8,
    },
    /// The MTP module of the model.
    #[serde(rename = "Layer")]
    Mtp,
    /// A separate draft model in `ExecutorSettings::draft_model_dir`.
    #[serde(rename = "Model")]
    DraftModel,
    /// EAGLE-3: one layer in `ExecutorSettings::draft_model_dir` that reads auxiliary hidden states of the
    /// model.
    Eagle3,
}

/// Graphs of decode steps to capture before the executor is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GraphCaptureConfig {
    /// No graphs: every step is launched eagerly.
    #[serde(rename = "Nothing")]
    Disabled,
    /// Captures graphs for row counts that the executor chooses.
    #[serde(rename = "Usual")]
    DefaultSizes {
        /// Maximum row count; `None` = the maximum number of rows of a step.
        max_size: Option<u32>,
    },
    /// Captures graphs for these row counts, up to the maximum number of rows of a step.
    #[serde(rename = "Rows")]
    Sizes(Vec<u32>),
}

impl Default for GraphCaptureConfig {
    /// Returns the default row counts, up to the maximum number of rows of a step.
    fn default() -> Self {
        Self::DefaultSizes { max_size: None }
    }
}

/// Placement of experts (EPLB map): the expert in each physical slot of each layer. Of the `P` physical slots
/// of a layer, rank `r` of `n` ranks has the `P / n` slots from `r · P / n` on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExpertPlacement {
    /// `layers[l][s]` = expert in physical slot `s` of layer `l`; entries of dense layers are ignored.
    pub layers: Vec<Vec<u16>>,
}

/// Kind of compute device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DeviceKind {
    /// CPU; always available.
    #[default]
    Cpu,
    /// AMD GPU, through ROCm.
    Rocm,
    /// NVIDIA GPU, through the CUDA driver.
    Cuda,
}

/// Paths of device libraries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLibraries {
    /// Driver library: memory, streams, modules, graphs.
    pub driver: PathBuf,
    /// Run-time compiler; `None` = part of the driver library.
    pub compiler: Option<PathBuf>,
    /// BLAS library for matrix products; `None` = built-in kernels only.
    pub blas: Option<PathBuf>,
    /// Warp size of an emulated GPU; `None` = the libraries are not an emulator.
    pub emulated_warp_size: Option<u32>,
    /// RCCL or NCCL library, for communication between ranks; `None` = single rank.
    pub collectives: Option<PathBuf>,
}

/// Data type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelDtype {
    /// bf16: 8 exponent bits; accumulation in f32.
    Bfloat16,
    /// f32, the reference for the other types.
    Float32,
    /// f16: 5 exponent bits; accumulation in f32.
    Float16,
}

impl ModelDtype {
    /// Returns the name as in `config.json` and `--dtype`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
        }
    }
}

/// Data type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KvCacheDtype {
    /// The KV cache has the data type of the activations.
    #[default]
    Auto,
    /// The KV cache stores fp8 e4m3, with the scales of the checkpoint if it has any.
    Fp8,
}

/// Size of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KvCacheSize {
    /// On the CPU, the smaller of 4 GiB and a quarter of the memory that is free after the warm-up; on a GPU,
    /// the memory that `ExecutorSettings::memory_utilization` leaves for the KV cache.
    #[default]
    Auto,
    /// The number of blocks that fit into this number of bytes.
    Bytes(u64),
    /// This number of blocks.
    Blocks(u32),
}
