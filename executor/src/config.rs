//! What an executor is told at start.

use protocol::Settings;

pub use protocol::{Dtype, KvDtype, KvSize};

/// Most likeliest ids that a GPU lists for one token: what the sampling kernel sorts in shared memory.
pub const GPU_LOGPROBS_MAX: u32 = 1024;

/// Everything an executor needs to know before its first message.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// What a process is told to become this executor.
    pub settings: Settings,
    /// What is computed: the folder's configuration, already read.
    pub model: models::Config,
    /// The same of the model that drafts for it, if one does.
    pub draft: Option<models::Config>,
    /// Digest of the folders (`models::manifest`); whoever starts the executor compares it with its own.
    pub manifest: u64,
}

/// Where an executor that is told this finds its weights.
pub fn source(settings: &Settings) -> models::LoadFormat {
    match settings.synth_seed {
        Some(seed) => models::LoadFormat::Synth { seed },
        None => models::LoadFormat::Safetensors,
    }
}
