//! From a model folder to a model.

use crate::config::Architecture;
use crate::deepseek::Deepseek;
use crate::llama::Llama;
use crate::mistral::Mistral;
use crate::qwen2::Qwen2;
use crate::qwen3::Qwen3;
use crate::qwen3_moe::Qwen3Moe;
use crate::sharding::Ranks;
use crate::table::tensors;
use crate::weights::{LoadObserver, Source, check_split};
use crate::{Config, Eagle3, LoadError, Model, Weights};
use ops::{DType, Ops};
use protocol::{ExpertPlacement, WeightsDigest};
use std::path::Path;

/// Where weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadFormat {
    /// The folder's safetensors files.
    Safetensors,
    /// The hash that synthetic checkpoints are written with; the folder needs no weights.
    Synth {
        /// Changes every value.
        seed: u64,
    },
}

/// How to load.
pub struct LoadOptions<'a> {
    /// Holds the weights; its dtype is the model's.
    pub ops: &'a Ops,
    /// Which part of the model this is: what its forward passes find in their groups.
    pub ranks: Ranks,
    /// Where experts lie; `None` = each once, in order.
    pub placement: Option<&'a ExpertPlacement>,
    /// Where weights come from.
    pub format: LoadFormat,
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

impl std::fmt::Debug for LoadOptions<'_> {
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
    config: &Config,
    options: LoadOptions<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    if config.latent.is_some() {
        let refused =
            |error| LoadError::Device { tensor: "model.layers.*.self_attn".to_owned(), error };
        options.ops.check_latent_attention(options.kv_dtype).map_err(refused)?;
    }
    let progress = options.progress;
    let progress = &mut |done, total| progress(done, total);
    let w = weights(dir, config, LoadOptions { progress, ..options })?;
    let model: Box<dyn Model> = match config.architecture {
        Architecture::Llama => Box::new(Llama::load(config, &w)?),
        Architecture::Mistral => Box::new(Mistral::load(config, &w)?),
        Architecture::Qwen2 => Box::new(Qwen2::load(config, &w)?),
        Architecture::Qwen3 => Box::new(Qwen3::load(config, &w)?),
        Architecture::Qwen3Moe => Box::new(Qwen3Moe::load(config, &w)?),
        Architecture::DeepseekV2 | Architecture::DeepseekV3 => {
            Box::new(Deepseek::load(config, &w)?)
        }
        Architecture::LlamaEagle3 => return Err(LoadError::DraftsOnly { dir: dir.to_owned() }),
    };
    w.finish()?;
    Ok(model)
}

/// The same of a checkpoint that drafts for the model `target`.
pub fn load_eagle3(
    dir: &Path,
    (config, target): (&Config, &Config),
    options: LoadOptions<'_>,
) -> Result<Eagle3, LoadError> {
    let progress = options.progress;
    let progress = &mut |done, total| progress(done, total);
    let w = weights(dir, config, LoadOptions { progress, ..options })?;
    let eagle = Eagle3::load((config, target), &w)?;
    w.finish()?;
    Ok(eagle)
}

/// The weights of a folder, checked.
fn weights<'a>(
    dir: &Path,
    config: &'a Config,
    options: LoadOptions<'a>,
) -> Result<Weights<'a>, LoadError> {
    let LoadOptions {
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
        LoadFormat::Safetensors => Source::open(dir, config, &tensors(config))?,
        LoadFormat::Synth { seed } => Source::Synth { seed, threads },
    };
    let observer = LoadObserver::new(progress, digest, threads);
    Weights::new(config, source, ops, (ranks, placement), kv_dtype, max_positions, observer)
}
