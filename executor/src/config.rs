//! Configuration of an executor: the settings that the engine sends, and the parsed model configurations.

use protocol::ExecutorSettings;

use crate::DeviceEnvironment;

pub use protocol::{KvCacheDtype, KvCacheSize, ModelDtype};

/// Maximum number of top log-probabilities per token on a GPU: the sampling kernel sorts at most this number
/// in shared memory.
pub const GPU_LOGPROBS_MAX: u32 = 1024;

/// Configuration from which an executor is started.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// Settings that the engine sends to the executor.
    pub settings: ExecutorSettings,
    /// Environment variables of GPU drivers in this process.
    pub environment: DeviceEnvironment,
    /// Parsed `config.json` of the target model.
    pub model: models::ModelConfig,
    /// Parsed `config.json` of the draft model; `None` = no draft model.
    pub draft: Option<models::ModelConfig>,
    /// Digest of the model files that this executor has read (`models::manifest`). The engine rejects an
    /// executor whose digest differs from the engine's own digest.
    pub manifest: u64,
}

/// Returns the source of the weights: random values if a synthetic seed is set, safetensors files otherwise.
pub fn source(settings: &ExecutorSettings) -> models::LoadFormat {
    match settings.synth_seed {
        Some(seed) => models::LoadFormat::Synth { seed },
        None => models::LoadFormat::Safetensors,
    }
}
