//! From a model folder to a model.

use crate::config::ModelArchitecture;
use crate::deepseek::DeepseekModel;
use crate::llama::LlamaModel;
use crate::mistral::MistralModel;
use crate::qwen2::Qwen2Model;
use crate::qwen3::Qwen3Model;
use crate::qwen3_moe::Qwen3MoeModel;
use crate::sharding::ParallelRanks;
use crate::weight_table::tensors;
use crate::weights::{LoadObserver, WeightSource, check_split};
use crate::{Eagle3Model, LoadedModel, ModelConfig, ModelLoadError, Weights};
use ops::{DType, Ops};
use protocol::{ExpertPlacement, WeightsDigest};
use std::path::Path;

/// Where weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightsFormat {
    /// The folder's safetensors files.
    Safetensors,
    /// The hash that synthetic checkpoints are written with; the folder needs no weights.
    Synth {
        /// Changes every value.
        seed: u64,
    },
}

/// How to load.
pub struct ModelLoadOptions<'a> {
    /// Holds the weights; its dtype is the model's.
    pub ops: &'a Ops,
    /// Which part of the model this is: what its forward passes find in their groups.
    pub ranks: ParallelRanks,
    /// Where experts lie; `None` = each once, in order.
    pub placement: Option<&'a ExpertPlacement>,
    /// Where weights come from.
    pub format: WeightsFormat,
    /// Type of the KV cache: the model's, or fp8.
    pub kv_dtype: DType,
    /// Longest context that will be asked for: positions of the rotation tables.
    pub max_positions: usize,
    /// Threads that make synthetic values and digests.
    pub threads: usize,
    /// Told how many bytes of how many are loaded.
    pub progress: &'a mut dyn FnMut(u64, u64),
    /// Gets the digests of the bytes that are read added.
    pub digest: &'a mut WeightsDigest,
}

impl std::fmt::Debug for ModelLoadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { ranks, format, max_positions, threads, .. } = self;
        write!(
            f,
            "LoadOptions({ranks:?}, {format:?}, {max_positions} positions, {threads} threads)"
        )
    }
}

/// Loads a rank's part of the model of a folder whose `config` has been read.
///
/// All names, shapes, dtypes and sizes are checked before the first weight is read.
pub fn load_model(
    dir: &Path,
    config: &ModelConfig,
    options: ModelLoadOptions<'_>,
) -> Result<LoadedModel, ModelLoadError> {
    if config.mla.is_some() {
        let refused =
            |error| ModelLoadError::Device { tensor: "model.layers.*.self_attn".to_owned(), error };
        options.ops.check_mla(options.kv_dtype).map_err(refused)?;
    }
    let progress = options.progress;
    let progress = &mut |done, total| progress(done, total);
    let w = weights(dir, config, ModelLoadOptions { progress, ..options })?;
    let loaded = match config.architecture {
        ModelArchitecture::Llama => LlamaModel::load(config, &w)?,
        ModelArchitecture::Mistral => MistralModel::load(config, &w)?,
        ModelArchitecture::Qwen2 => Qwen2Model::load(config, &w)?,
        ModelArchitecture::Qwen3 => Qwen3Model::load(config, &w)?,
        ModelArchitecture::Qwen3Moe => Qwen3MoeModel::load(config, &w)?,
        ModelArchitecture::DeepseekV2 | ModelArchitecture::DeepseekV3 => {
            DeepseekModel::load(config, &w)?
        }
        ModelArchitecture::LlamaEagle3 => {
            return Err(ModelLoadError::DraftModelOnly { dir: dir.to_owned() });
        }
    };
    w.finish()?;
    Ok(loaded)
}

/// The same of a checkpoint that drafts for the model `target`.
pub fn load_eagle3(
    dir: &Path,
    (config, target): (&ModelConfig, &ModelConfig),
    options: ModelLoadOptions<'_>,
) -> Result<Eagle3Model, ModelLoadError> {
    let progress = options.progress;
    let progress = &mut |done, total| progress(done, total);
    let w = weights(dir, config, ModelLoadOptions { progress, ..options })?;
    let eagle = Eagle3Model::load((config, target), &w)?;
    w.finish()?;
    Ok(eagle)
}

/// The weights of a folder, checked.
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
        max_positions,
        threads,
        progress,
        digest,
    } = options;
    check_split(config, &ranks, placement)?;
    let source = match format {
        WeightsFormat::Safetensors => WeightSource::open(dir, config, &tensors(config))?,
        WeightsFormat::Synth { seed } => WeightSource::Synth { seed, threads },
    };
    let observer = LoadObserver::new(progress, digest, threads);
    Weights::new(config, source, ops, (ranks, placement), kv_dtype, max_positions, observer)
}
