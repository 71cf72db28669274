//! Limits of the sampler, which are checked before a model is loaded.

use kernels::gpu::GpuBackend;
use models::ModelConfig;
use models::sharding::{ParallelRank, ParallelRanks};
use protocol::{DeviceKind, ParallelConfig};

/// The vocabulary of a model is too large for the sampling kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "field `vocab_size` in config.json is {vocab}: GPUs sample from at most {limit} token ids, including the padding of ranks; use --device cpu"
)]
pub struct VocabularyLimitError {
    /// Vocabulary size of the model.
    pub vocab: usize,
    /// Maximum number of columns of a logits row.
    pub limit: usize,
}

/// Checks that devices of the kind `device` can sample tokens of a model. A logits row may contain the whole vocabulary on
/// any number of ranks, because ranks gather the rows that vocab-parallel sampling does not support.
///
/// Errors: the vocabulary with its padding exceeds the limit of the device.
pub fn check_sampler(
    device: DeviceKind,
    parallel: ParallelConfig,
    model: &ModelConfig,
) -> Result<(), VocabularyLimitError> {
    if device == DeviceKind::Cpu || !model.head.generates() {
        return Ok(());
    }
    let tp = ParallelRank { rank: 0, size: usize::from(parallel.tp_size) };
    let shard = ParallelRanks { tp, ep: ParallelRank::SINGLE }.vocab_shard(model.vocab);
    let (vocab, limit) = (model.vocab, GpuBackend::VOCABULARY_MAX);
    if shard.cols * shard.ranks > limit {
        return Err(VocabularyLimitError { vocab, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn model(architecture: &str, vocab: usize) -> ModelConfig {
        let json = serde_json::json!({
            "architectures": [architecture], "vocab_size": vocab, "hidden_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 512
        });
        ModelConfig::from_json(Path::new("config.json"), &json.to_string()).unwrap()
    }

    #[test]
    fn vocabulary_above_the_gpu_limit_is_rejected() {
        let check = |device, tp_size, vocab| {
            let parallel = ParallelConfig { tp_size, ..ParallelConfig::default() };
            check_sampler(device, parallel, &model("Qwen3ForCausalLM", vocab))
        };
        let limit = GpuBackend::VOCABULARY_MAX;
        assert_eq!(check(DeviceKind::Cuda, 1, limit), Ok(()));
        assert_eq!(check(DeviceKind::Cuda, 2, limit), Ok(()));
        // Three ranks pad the vocabulary to a multiple of 192 ids.
        for (device, tp_size, vocab) in [
            (DeviceKind::Cuda, 1, limit + 1),
            (DeviceKind::Rocm, 2, limit + 1),
            (DeviceKind::Cuda, 3, limit),
        ] {
            let error = VocabularyLimitError { vocab, limit };
            assert_eq!(check(device, tp_size, vocab), Err(error), "{device:?} {tp_size}");
        }
        assert_eq!(check(DeviceKind::Cpu, 1, limit + 1), Ok(()));
        let pooling = model("Qwen3Model", limit + 1);
        assert_eq!(check_sampler(DeviceKind::Cuda, ParallelConfig::default(), &pooling), Ok(()));
    }
}
