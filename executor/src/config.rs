//! What an executor is told at start.

use protocol::{Device, DeviceLibraries, Epoch, Rank, Settings};
use std::path::PathBuf;

pub use protocol::{Dtype, KvSize};

/// Everything an executor needs to know before its first message.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// The model folder.
    pub dir: PathBuf,
    /// What is computed: the folder's configuration, already read.
    pub model: models::Config,
    /// Digest of the folder (`models::manifest`); whoever starts the executor compares it with its own.
    pub manifest: u64,
    /// Where the weights come from.
    pub source: models::LoadFormat,
    /// What to compute on.
    pub device: Device,
    /// Device libraries by path, in place of those of the system.
    pub libraries: Option<DeviceLibraries>,
    /// Where compiled kernels are kept; `None` = nowhere.
    pub kernel_cache: Option<PathBuf>,
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

impl ExecutorConfig {
    /// What a process must be told to become this executor. `overrides` are the members of
    /// `config.json` that were replaced, a JSON object.
    pub fn settings(&self, overrides: Option<String>) -> Settings {
        Settings {
            dir: self.dir.clone(),
            overrides,
            synth_seed: match self.source {
                models::LoadFormat::Synth { seed } => Some(seed),
                models::LoadFormat::Safetensors => None,
            },
            device: self.device,
            libraries: self.libraries.clone(),
            kernel_cache: self.kernel_cache.clone(),
            dtype: self.dtype,
            threads: self.threads.map(|threads| threads as u32),
            block_tokens: self.block_tokens,
            max_model_len: self.max_model_len,
            kv_tokens_min: self.kv_tokens_min,
            max_num_seqs: self.max_num_seqs,
            tokens_per_step: self.tokens_per_step,
            kv: self.kv,
            memory_utilization: self.memory_utilization,
            enforce_eager: self.enforce_eager,
            logprobs_max: self.logprobs_max,
            epoch: self.epoch,
            rank: self.rank,
        }
    }

    /// The executor that a process was told to become; `model` and `manifest` it has read itself.
    pub fn from_settings(settings: Settings, model: models::Config, manifest: u64) -> Self {
        Self {
            source: source(&settings),
            dir: settings.dir,
            model,
            manifest,
            device: settings.device,
            libraries: settings.libraries,
            kernel_cache: settings.kernel_cache,
            dtype: settings.dtype,
            threads: settings.threads.map(|threads| threads as usize),
            block_tokens: settings.block_tokens,
            max_model_len: settings.max_model_len,
            kv_tokens_min: settings.kv_tokens_min,
            max_num_seqs: settings.max_num_seqs,
            tokens_per_step: settings.tokens_per_step,
            kv: settings.kv,
            memory_utilization: settings.memory_utilization,
            enforce_eager: settings.enforce_eager,
            logprobs_max: settings.logprobs_max,
            epoch: settings.epoch,
            rank: settings.rank,
        }
    }
}

/// Where an executor that is told this finds its weights.
pub fn source(settings: &Settings) -> models::LoadFormat {
    match settings.synth_seed {
        Some(seed) => models::LoadFormat::Synth { seed },
        None => models::LoadFormat::Safetensors,
    }
}
