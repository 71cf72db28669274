//! Configuration of an executor.

use protocol::ExecutorSettings;

pub use protocol::{KvCacheDtype, KvCacheSize, ModelDtype};

/// Maximum number of top log-probabilities per token on a GPU: what the sampling kernel sorts in shared
/// memory.
pub const GPU_LOGPROBS_MAX: u32 = 1024;

/// Everything that an executor needs before its first message.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// Settings sent by the engine.
    pub settings: ExecutorSettings,
    /// Configuration of the target model, read from its folder.
    pub model: models::ModelConfig,
    /// Configuration of the draft model, if there is one.
    pub draft: Option<models::ModelConfig>,
    /// Digest of the model folders (`models::manifest`), which the engine compares with its own.
    pub manifest: u64,
}

/// Weights format of an executor with these settings.
pub fn source(settings: &ExecutorSettings) -> models::WeightsFormat {
    match settings.synth_seed {
        Some(seed) => models::WeightsFormat::Synth { seed },
        None => models::WeightsFormat::Safetensors,
    }
}
