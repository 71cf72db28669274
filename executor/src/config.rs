//! What an executor is told at start.

use protocol::{Epoch, Rank};
use std::path::PathBuf;

/// Everything an executor needs to know before its first message.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// The model folder.
    pub dir: PathBuf,
    /// What is computed: the folder's configuration, already read.
    pub model: models::Config,
    /// Where the weights come from.
    pub source: models::LoadFormat,
    /// Type of weights, activations and KV cache.
    pub dtype: Dtype,
    /// Threads that compute; `None` = one per physical core.
    pub threads: Option<usize>,
    /// Token positions per KV block.
    pub block_tokens: u32,
    /// Longest request, prompt and output, in tokens.
    pub max_model_len: u32,
    /// Fewest token positions the KV cache must hold, or start-up is refused: `max_model_len` where
    /// that was asked for, less where the scheduler may serve shorter requests.
    pub kv_tokens_min: u32,
    /// Seats: requests computed at a time.
    pub max_num_seqs: u32,
    /// Tokens of one step.
    pub tokens_per_step: u32,
    /// Size of the KV cache.
    pub kv: KvSize,
    /// Share of a GPU's memory to use, weights and all.
    pub memory_utilization: f64,
    /// Whether steps are launched kernel by kernel although the device can replay recordings.
    pub enforce_eager: bool,
    /// Most log-probabilities a request may ask for.
    pub logprobs_max: u32,
    /// Group generation; batches of another one are dropped.
    pub epoch: Epoch,
    /// Rank in the world.
    pub rank: Rank,
}

/// Type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dtype {
    /// What the checkpoint names; half precision becomes bfloat16, which the CPU computes in.
    #[default]
    Auto,
    /// 16 bits; sums in f32.
    Bfloat16,
    /// 32 bits: the exact reference.
    Float32,
}

/// How large the KV cache becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvSize {
    /// The lesser of 4 GiB and a quarter of the memory that is free after the warm-up.
    #[default]
    Auto,
    /// As many blocks as fit into so many bytes.
    Bytes(u64),
    /// So many blocks.
    Blocks(u32),
}
