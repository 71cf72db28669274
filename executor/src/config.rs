//! What an executor is told at start.

use protocol::ExecutorSettings;

pub use protocol::{KvCacheDtype, KvCacheSize, ModelDtype};

/// Most likeliest ids that a GPU lists for one token: what the sampling kernel sorts in shared memory.
pub const GPU_LOGPROBS_MAX: u32 = 1024;

/// Everything an executor needs to know before its first message.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// What a process is told to become this executor.
    pub settings: ExecutorSettings,
    /// What is computed: the folder's configuration, already read.
    pub model: models::ModelConfig,
    /// The same of the model that drafts for it, if one does.
    pub draft: Option<models::ModelConfig>,
    /// Digest of the folders (`models::manifest`); whoever starts the executor compares it with its own.
    pub manifest: u64,
}

/// Where an executor that is told this finds its weights.
pub fn source(settings: &ExecutorSettings) -> models::WeightsFormat {
    match settings.synth_seed {
        Some(seed) => models::WeightsFormat::Synth { seed },
        None => models::WeightsFormat::Safetensors,
    }
}
