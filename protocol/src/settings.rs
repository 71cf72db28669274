//! What an executor process is told before anything else.

use crate::{Epoch, Rank};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Everything an executor process must know; the model folder it reads itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutorSettings {
    /// The model folder.
    pub model_dir: PathBuf,
    /// The folder of the model that drafts for it, if one does.
    pub draft_model_dir: Option<PathBuf>,
    /// Members to replace in the model's `config.json`: a JSON object.
    pub config_overrides: Option<String>,
    /// Seed of synthetic weights; `None` = the weights of the folder.
    pub synth_seed: Option<u64>,
    /// What to compute on.
    pub device: DeviceKind,
    /// Each rank's GPU, by its place among those that the driver shows; empty = that of its rank.
    pub gpus: Vec<u32>,
    /// Device libraries by path, in place of those of the system.
    pub libraries: Option<DeviceLibraries>,
    /// Where compiled kernels are kept; `None` = nowhere.
    pub kernel_cache: Option<PathBuf>,
    /// Type of weights and activations.
    pub dtype: ModelDtype,
    /// Type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Threads that compute on the CPU; `None` = one per physical core.
    pub threads: Option<u32>,
    /// Token positions per KV block.
    pub block_tokens: u32,
    /// Longest request, prompt and output, in tokens.
    pub max_model_len: u32,
    /// Fewest token positions the KV cache must hold.
    pub kv_tokens_min: u32,
    /// Seats: requests computed at a time.
    pub max_num_seqs: u32,
    /// Tokens of one step.
    pub tokens_per_step: u32,
    /// Size of the KV cache.
    pub kv_cache_size: KvCacheSize,
    /// Share of a GPU's memory to use, weights and all.
    pub memory_utilization: f64,
    /// Steps to record, where the device can replay recordings.
    pub graph_capture: GraphCapture,
    /// How rows get drafts; `None` = they have none.
    pub speculative: Option<SpeculativeConfig>,
    /// Most log-probabilities a request may ask for.
    pub max_logprobs: u32,
    /// Folder for a trace of the executor's steps; `None` = none is kept.
    pub profile_dir: Option<PathBuf>,
    /// Group generation; batches of another one are dropped.
    pub epoch: Epoch,
    /// Rank in the world: `dp · tp_size + tp`.
    pub rank: Rank,
    /// How the world is laid out.
    pub parallel: ParallelConfig,
    /// Ranks of the world on this one's machine, itself among them: they share its cores and its memory.
    pub ranks_on_host: u16,
    /// Where experts lie; `None` = each once, in order.
    pub expert_placement: Option<ExpertPlacement>,
    /// Shared memory in which the ranks of this one's groups meet: a file that every rank maps; `None` = alone.
    pub rendezvous: Option<PathBuf>,
    /// Whether GPUs that reach each other's memory make small sums there; otherwise all are the library's.
    pub one_shot_all_reduce: bool,
}

/// How the ranks of a world share the work. The ranks of one replica come one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParallelConfig {
    /// Ranks that share every layer of a replica.
    pub tp_size: u16,
    /// Replicas, each with a KV cache of its own.
    pub dp_size: u16,
    /// Whether experts are held whole, each by one rank of the world, instead of in parts by all ranks of a replica.
    pub expert_parallel: bool,
}

impl Default for ParallelConfig {
    /// One rank.
    fn default() -> Self {
        Self { tp_size: 1, dp_size: 1, expert_parallel: false }
    }
}

impl ParallelConfig {
    /// Ranks of the world.
    #[must_use]
    pub fn world_size(self) -> u16 {
        self.tp_size * self.dp_size
    }

    /// Whether replicas step together, because they share experts.
    #[must_use]
    pub fn lockstep(self) -> bool {
        self.expert_parallel && self.dp_size > 1
    }
}

/// Tokens guessed ahead of those that are sampled, and verified together with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeculativeConfig {
    /// Most drafts of a row.
    pub draft_tokens: u8,
    /// Who makes them.
    pub method: SpeculativeMethod,
    /// Which of them stand.
    pub acceptance: DraftAcceptance,
}

/// Which drafts stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DraftAcceptance {
    /// Those that would have been said without them.
    #[default]
    Exact,
    /// A benchmark's: each stands with this chance, in thousandths, whatever the model says of it. Answers mean nothing then.
    Synthetic {
        /// The chance.
        per_mille: u16,
    },
}

/// Who guesses tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpeculativeMethod {
    /// What followed the newest tokens of a request where they stand earlier in it. It reads
    /// [`SequenceInit::history`](crate::SeatInit) of every request.
    Ngram {
        /// Fewest tokens that must be the same, at least 1.
        lookup_min: u8,
        /// More are not compared.
        lookup_max: u8,
    },
    /// The model's own draft layer.
    #[serde(rename = "Layer")]
    Mtp,
    /// A model of its own, in `ExecutorSettings::draft_dir`.
    #[serde(rename = "Model")]
    DraftModel,
    /// One layer that begins with hidden states of the model, in `ExecutorSettings::draft_dir`.
    Eagle3,
}

/// Pure decode steps that are recorded before the executor is ready, and replayed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GraphCapture {
    /// None: every step is launched kernel by kernel.
    #[serde(rename = "Nothing")]
    Disabled,
    /// Numbers of rows of the executor's choice.
    #[serde(rename = "Usual")]
    DefaultSizes {
        /// Most rows; `None` = as many as a step may have.
        max_size: Option<u32>,
    },
    /// These numbers of rows, as far as a step may have so many.
    #[serde(rename = "Rows")]
    Sizes(Vec<u32>),
}

impl Default for GraphCapture {
    /// As many as a step may have.
    fn default() -> Self {
        Self::DefaultSizes { max_size: None }
    }
}

/// The expert of each place of each layer. Of the `P` places of a layer, rank `r` of `n` has those from `r · P / n` on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExpertPlacement {
    /// By layer and place; what stands for a dense layer means nothing.
    pub layers: Vec<Vec<u16>>,
}

/// What an executor computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DeviceKind {
    /// The processor; always there.
    #[default]
    Cpu,
    /// An AMD GPU, through ROCm.
    Rocm,
    /// An NVIDIA GPU, through the CUDA driver.
    Cuda,
}

/// Device libraries by path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLibraries {
    /// The driver: memory, streams, modules, graphs.
    pub driver: PathBuf,
    /// The run-time compiler; `None` = the driver's library holds it.
    pub compiler: Option<PathBuf>,
    /// Matrix products; `None` = our own kernels only.
    pub blas: Option<PathBuf>,
    /// The libraries emulate a GPU, with waves of so many lanes.
    pub emulated_warp_size: Option<u32>,
    /// RCCL or NCCL, through which ranks reach each other; `None` = there is one rank.
    pub collectives: Option<PathBuf>,
}

/// Type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelDtype {
    /// 16 bits, 8 of them exponent; sums in f32.
    Bfloat16,
    /// 32 bits: the exact reference.
    Float32,
    /// 16 bits, 5 of them exponent; sums in f32.
    Float16,
}

impl ModelDtype {
    /// As `config.json` and `--dtype` write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
        }
    }
}

/// Type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KvCacheDtype {
    /// As the activations.
    #[default]
    Auto,
    /// fp8 e4m3, with the checkpoint's factors if it has some.
    Fp8,
}

/// How large the KV cache becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KvCacheSize {
    /// On the CPU the lesser of 4 GiB and a quarter of the memory that is free after the warm-up; on a
    /// GPU what its share of the memory leaves.
    #[default]
    Auto,
    /// As many blocks as fit into so many bytes.
    Bytes(u64),
    /// So many blocks.
    Blocks(u32),
}
