//! Loading of target models and EAGLE-3 draft models from a model folder.

use crate::config::DecoderLayerKind;
use crate::deepseek::DeepseekModel;
use crate::gemma4::Gemma4Model;
use crate::llama::LlamaModel;
use crate::qwen3::Qwen3Model;
use crate::qwen3_moe::Qwen3MoeModel;
use crate::qwen3_next::Qwen3NextModel;
use crate::sharding::ParallelRanks;
use crate::weight_table::tensors;
use crate::weights::{WeightLoadObserver, WeightLoadTarget, WeightSource, check_split};
use crate::{Eagle3Model, KvGrouping, LoadedModel, ModelConfig, ModelLoadError, Weights};
use ops::{DType, Ops};
use protocol::{ExpertPlacement, WeightsDigest};
use std::path::Path;

/// Format from which weights are loaded (`--load-format`): weight files or synthetic values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadFormat {
    /// Safetensors files in the model folder.
    Safetensors,
    /// Synthetic values that a hash function computes; the folder needs no weight files.
    Synth {
        /// Seed from which all weight values are computed.
        seed: u64,
    },
}

/// Options of `load_model` and `load_eagle3`.
pub struct ModelLoadOptions<'a> {
    /// Ops of the device on which weights are stored. The dtype of the ops is also the dtype of the model.
    pub ops: &'a Ops,
    /// Indices of this rank on the tensor-parallel and expert-parallel axes. They must agree with the
    /// parallel groups in the `ForwardContext` of later forward passes.
    pub ranks: ParallelRanks,
    /// Expert placement; `None` = each expert has one copy, in ascending order of experts.
    pub placement: Option<&'a ExpertPlacement>,
    /// Source from which the weights are loaded.
    pub format: LoadFormat,
    /// Dtype of the KV cache: the model's dtype, or fp8.
    pub kv_dtype: DType,
    /// Assignment of the layers to KV groups. The KV pool and the batches of later forward passes must have
    /// these groups.
    pub kv_grouping: &'a KvGrouping,
    /// Number of positions in the RoPE tables: the longest context that requests can use, in tokens.
    pub max_positions: usize,
    /// Number of threads that compute synthetic weights, or hash the loaded weights for the digest.
    pub threads: usize,
    /// Called with the number of weight bytes loaded so far and the total number of weight bytes.
    pub progress: &'a mut dyn FnMut(u64, u64),
    /// Accumulator to which the digests of all loaded bytes are added, so that ranks can compare their
    /// weights.
    pub digest: &'a mut WeightsDigest,
}

impl std::fmt::Debug for ModelLoadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { ranks, format, max_positions, threads, .. } = self;
        write!(
            f,
            "ModelLoadOptions({ranks:?}, {format:?}, {max_positions} positions, {threads} threads)"
        )
    }
}

/// Loads this rank's part of a model from a folder; `config` is the parsed configuration of the model folder.
///
/// All names, shapes, dtypes and sizes are checked before the first weight is read.
pub fn load_model(
    dir: &Path,
    config: &ModelConfig,
    options: ModelLoadOptions<'_>,
) -> Result<LoadedModel, ModelLoadError> {
    if config.mla.is_some() {
        let unsupported =
            |error| ModelLoadError::Device { tensor: "model.layers.*.self_attn".to_owned(), error };
        options.ops.check_mla(options.kv_dtype).map_err(unsupported)?;
    }
    let progress = options.progress;
    let progress = &mut |done, total| progress(done, total);
    let w = weights(dir, config, ModelLoadOptions { progress, ..options })?;
    let loaded = match config.architecture.traits().decoder_layer {
        DecoderLayerKind::Llama => LlamaModel::load(config, &w)?,
        DecoderLayerKind::Qwen3 => Qwen3Model::load(config, &w)?,
        DecoderLayerKind::Qwen3Moe => Qwen3MoeModel::load(config, &w)?,
        DecoderLayerKind::Qwen3Next => Qwen3NextModel::load(config, &w)?,
        DecoderLayerKind::Gemma4 => Gemma4Model::load(config, &w)?,
        DecoderLayerKind::Deepseek => DeepseekModel::load(config, &w)?,
        DecoderLayerKind::DraftOnly => {
            return Err(ModelLoadError::DraftModelOnly { dir: dir.to_owned() });
        }
    };
    w.finish()?;
    Ok(loaded)
}

/// Loads this rank's part of the EAGLE-3 draft model for the target model `target`.
pub fn load_eagle3(
    dir: &Path,
    config: &ModelConfig,
    target: &ModelConfig,
    options: ModelLoadOptions<'_>,
) -> Result<Eagle3Model, ModelLoadError> {
    let progress = options.progress;
    let progress = &mut |done, total| progress(done, total);
    let w = weights(dir, config, ModelLoadOptions { progress, ..options })?;
    let eagle = Eagle3Model::load(config, target, &w)?;
    w.finish()?;
    Ok(eagle)
}

/// Opens the weights of a folder, and checks names, shapes and the split over the ranks.
fn weights<'a>(
    dir: &Path,
    config: &'a ModelConfig,
    options: ModelLoadOptions<'a>,
) -> Result<Weights<'a>, ModelLoadError> {
    let ModelLoadOptions {
        ops,
        ranks,
        placement,
        format,
        kv_dtype,
        kv_grouping,
        max_positions,
        threads,
        progress,
        digest,
    } = options;
    check_split(config, &ranks, placement)?;
    let source = match format {
        LoadFormat::Safetensors => WeightSource::open(dir, config, &tensors(config))?,
        LoadFormat::Synth { seed } => WeightSource::Synth { seed, threads },
    };
    let observer = WeightLoadObserver::new(progress, digest, threads);
    let positions = max_positions;
    let target = WeightLoadTarget { ops, ranks, placement, kv_dtype, kv_grouping, positions };
    Weights::new(config, source, target, observer)
}
