//! Assignment of stored tensors to the weights of the weight table, before any weight is read.
//!
//! Every stored tensor must be used once or be ignored by a rule in this file, and every weight of the table
//! must be assigned a stored tensor. Otherwise the checkpoint is rejected with a list of missing and
//! unexpected tensors.

use super::checkpoint::SafetensorsCheckpoint;
use super::fused_weight::FusedWeightLocation;
use super::header::StoredDType;
use super::mxfp4::locate_mxfp4;
use super::scale_plan::{MissingAndUsedTensors, ScaleOwner, locate_scales};
use super::stored_names::{MTP, family_name, is_vision_tensor};
use crate::error::StoredTensorError;
use crate::sharding::WeightSlice;
use crate::synth::SynthDistribution;
use crate::weight_table::{EMBEDDING, HEAD, TensorSpec, mtp_copies};
use crate::{ModelConfig, ModelLoadError};
use ops::ActivationScaling;
use std::collections::BTreeMap;
use std::ops::Range;

/// Name suffixes of stored tensors that are ignored.
const IGNORED_SUFFIXES: &[&str] = &[
    ".rotary_emb.inv_freq", // RoPE frequencies are computed from the configuration.
];
/// Tensor of an EAGLE-3 checkpoint with one flag per target token id: whether any draft token id maps to it.
/// The tensor is ignored.
const TARGET_TO_DRAFT: &str = "t2d";
/// Name suffixes of KV cache scales, which are read only if the KV cache is quantised.
const KV_CACHE_SCALES: &[&str] =
    &[".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale"];
/// Name suffixes of the scales of queries and of attention probabilities. The scales are ignored, because
/// queries and attention probabilities are not quantised.
const ATTENTION_SCALES: &[&str] = &[".q_scale", ".prob_output_scale"];

/// Location of a weight in the stored tensors.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WeightLocation {
    /// Name of the stored tensor that contains the weight.
    pub(crate) stored: String,
    pub(crate) dtype: StoredDType,
    /// Byte range of the matrix that contains the weight, within the stored tensor: the whole tensor, or one
    /// expert of a fused tensor.
    pub(crate) bytes: Range<usize>,
    /// Location of the weight in this matrix.
    pub(crate) layout: StackedRowRange,
    /// Name of the stored tensor with the scales of the matrix, if the weight is quantised. Weights of the dtype
    /// U8 are MXFP4.
    pub(crate) scales: Option<String>,
    /// Index of the first scale of the matrix in this tensor.
    pub(crate) first_scale: usize,
    /// Rule for the activation scales of the layer with this weight.
    pub(crate) activation_scaling: ActivationScaling,
}

impl WeightLocation {
    /// Creates the location of a weight without scales.
    fn unscaled(
        stored: String,
        dtype: StoredDType,
        bytes: Range<usize>,
        layout: StackedRowRange,
    ) -> Self {
        let activation_scaling = ActivationScaling::default();
        let (scales, first_scale) = (None, 0);
        Self { stored, dtype, bytes, layout, scales, first_scale, activation_scaling }
    }
}

/// Location of a weight in a stored matrix; the matrix may stack the rows of several weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StackedRowRange {
    /// First row of the weight in the matrix, or first column if the matrix is transposed.
    pub(crate) first: usize,
    /// Distance between successive rows (columns) of the weight.
    pub(crate) step: usize,
    /// Number of rows of the matrix, or of columns if the matrix is transposed.
    pub(crate) count: usize,
    /// Whether the matrix is stored transposed, as `[inputs, outputs]`.
    pub(crate) transposed: bool,
}

impl StackedRowRange {
    /// Rows of the matrix from the first to the last row of the slice `slice` of the weight. If the rows of several
    /// weights alternate, the range contains rows of the other weights.
    pub(super) fn span(self, slice: &WeightSlice) -> Range<usize> {
        let first = self.first + slice.rows.start * self.step;
        let rows = slice.rows.len();
        first..first + rows.saturating_sub(1) * self.step + rows.min(1)
    }
}

/// Locates every weight of the table.
///
/// Errors: weights are missing, stored tensors are unused, or tensors are invalid.
pub(crate) fn locate(
    checkpoint: &SafetensorsCheckpoint,
    config: &ModelConfig,
    specs: &[TensorSpec],
) -> Result<BTreeMap<String, WeightLocation>, ModelLoadError> {
    let mut located = BTreeMap::new();
    let mut coverage = MissingAndUsedTensors::default();
    for spec in specs {
        let fused = FusedWeightLocation::of(spec, config);
        if let Some(found) = locate_mxfp4(checkpoint, spec, fused.as_ref())? {
            coverage.used.insert(found.stored.clone());
            coverage.used.extend(found.scales.clone());
            located.insert(spec.name.clone(), found);
            continue;
        }
        let stored_fused = fused.as_ref().filter(|f| checkpoint.get(&f.name).is_some());
        let is_separate = checkpoint.get(&spec.name).is_some();
        let mut found = match (is_separate, stored_fused) {
            (true, Some(fused)) => {
                let fault = StoredTensorError::StoredTwice(spec.name.clone());
                return Err(checkpoint.fault(&fused.name, fault));
            }
            (true, None) => locate_whole(checkpoint, spec)?,
            (false, Some(fused)) => locate_fused(checkpoint, spec, fused)?,
            (false, None) if spec.optional => continue,
            (false, None) => {
                coverage.missing.push(spec.name.clone());
                continue;
            }
        };
        coverage.used.insert(found.stored.clone());
        if let Some(scales) = spec.scales.as_ref().filter(|_| found.dtype == StoredDType::F8E4M3) {
            let owner = match fused.as_ref() {
                Some(fused) if !is_separate => ScaleOwner::fused(spec, fused, scales.format),
                Some(fused) => ScaleOwner::separate(checkpoint, spec, fused, scales.format),
                None => ScaleOwner::weight(spec),
            };
            let Some(located) = locate_scales(checkpoint, &owner, scales, &mut coverage)? else {
                continue;
            };
            found.scales = Some(located.weight);
            found.first_scale = owner.first_scale;
            found.activation_scaling = located.activation_scaling;
        }
        located.insert(spec.name.clone(), found);
    }
    equalise_expert_scales(&mut located);
    let MissingAndUsedTensors { missing, mut used } = coverage;
    let missing: Vec<String> = missing.iter().map(|name| family_name(config, name)).collect();
    if config.tied && checkpoint.get(HEAD).is_some() {
        // A model without an LM head ignores an LM head in its checkpoint.
        if config.head.has_lm_head() {
            check_same(checkpoint, HEAD, EMBEDDING, StoredTensorError::TiedHead)?;
        }
        used.insert(HEAD.to_owned());
    }
    for (copy, of) in if config.load_mtp { mtp_copies(config) } else { Vec::new() } {
        if checkpoint.get(&copy).is_some() {
            check_same(checkpoint, &copy, of, StoredTensorError::Copy(of))?;
            used.insert(copy);
        }
    }
    let has_ignored_suffix = |name: &str| {
        let suffixes = IGNORED_SUFFIXES.iter().chain(KV_CACHE_SCALES).chain(ATTENTION_SCALES);
        suffixes.into_iter().any(|suffix| name.ends_with(suffix))
    };
    let is_flags = |name: &str| config.eagle.is_some() && name == TARGET_TO_DRAFT;
    let is_ignored = |name: &str| {
        has_ignored_suffix(name)
            || is_unloaded_mtp(name, config)
            || is_shared_kv(name, config)
            || is_flags(name)
            || is_vision_tensor(config, name)
    };
    let unexpected = checkpoint.names().filter(|name| !used.contains(*name) && !is_ignored(name));
    let unexpected: Vec<String> =
        unexpected.map(|name| checkpoint.stored_name(name).to_owned()).collect();
    if missing.is_empty() && unexpected.is_empty() {
        return Ok(located);
    }
    Err(ModelLoadError::Coverage { dir: checkpoint.dir.clone(), missing, unexpected })
}

/// Replaces the static activation scales of a layer's experts by their maximum, separately for down projections
/// and for gate and up projections. With expert parallelism a rank has only some of the experts, so the maximum
/// over the experts of a rank would depend on the number of ranks.
fn equalise_expert_scales(located: &mut BTreeMap<String, WeightLocation>) {
    fn group(name: &str) -> Option<(&str, bool)> {
        let (layer, expert) = name.split_once(".experts.")?;
        Some((layer, expert.contains("down_proj")))
    }
    let mut largest: BTreeMap<(String, bool), f32> = BTreeMap::new();
    for (name, location) in &*located {
        if let (Some((layer, is_down)), ActivationScaling::Static(scale)) =
            (group(name), location.activation_scaling)
        {
            let entry = largest.entry((layer.to_owned(), is_down)).or_insert(scale);
            *entry = entry.max(scale);
        }
    }
    for (name, location) in located {
        let Some((layer, is_down)) = group(name) else { continue };
        if let (Some(scale), ActivationScaling::Static(own)) =
            (largest.get(&(layer.to_owned(), is_down)), &mut location.activation_scaling)
        {
            *own = *scale;
        }
    }
}

/// Whether the tensor `name` projects or normalises keys and values of a layer that reads those of an earlier layer. Checkpoints
/// of Gemma 4 have such tensors, which transformers ignores too (`Gemma4TextModel`).
fn is_shared_kv(name: &str, config: &ModelConfig) -> bool {
    const MODULES: [&str; 4] = ["k_proj", "v_proj", "k_norm", "v_norm"];
    let rest = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let Some((layer, rest)) = rest else { return false };
    let module = rest.strip_prefix("self_attn.").and_then(|rest| rest.split('.').next());
    let is_shared = |layer: usize| layer < config.layers && config.kv_source(layer) != layer;
    module.is_some_and(|module| MODULES.contains(&module)) && layer.parse().is_ok_and(is_shared)
}

/// Whether the tensor `name` belongs to an MTP module that is not loaded, because `load_mtp` is false.
fn is_unloaded_mtp(name: &str, config: &ModelConfig) -> bool {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
    let layer: Option<usize> = layer.and_then(|layer| layer.parse().ok());
    let unloaded = config.kv_layers()..config.layers + config.mtp_layers;
    // Checkpoints of Qwen3-Next do not state the number of MTP modules.
    let is_separate = config.gated_delta.is_some() && !config.load_mtp;
    let is_mtp = |layer| unloaded.contains(&layer) || is_separate && layer >= config.layers;
    is_separate && name.starts_with(MTP) || layer.is_some_and(is_mtp)
}

/// Locates a weight that is stored as a separate tensor. The stored dtype determines whether the weight is
/// quantised.
fn locate_whole(
    checkpoint: &SafetensorsCheckpoint,
    spec: &TensorSpec,
) -> Result<WeightLocation, ModelLoadError> {
    let allowed = match spec.values {
        SynthDistribution::Offsets => AllowedDTypes::DraftToTarget,
        _ if spec.may_be_fp8() => AllowedDTypes::Fp8,
        _ => AllowedDTypes::Float,
    };
    let (bytes, dtype) = check(checkpoint, &spec.name, &spec.shape, allowed)?;
    let layout = StackedRowRange { first: 0, step: 1, count: spec.matrix()[0], transposed: false };
    Ok(WeightLocation::unscaled(spec.name.clone(), dtype, 0..bytes, layout))
}

/// Locates a weight in a fused tensor.
fn locate_fused(
    checkpoint: &SafetensorsCheckpoint,
    spec: &TensorSpec,
    fused: &FusedWeightLocation,
) -> Result<WeightLocation, ModelLoadError> {
    let allowed = if spec.may_be_fp8() { AllowedDTypes::Fp8 } else { AllowedDTypes::Float };
    let (_, dtype) = check(checkpoint, &fused.name, &fused.shape(&spec.shape), allowed)?;
    let count = fused.rows;
    let matrix_bytes = count * spec.matrix()[1] * dtype.bytes() as usize;
    let bytes = fused.matrix * matrix_bytes..(fused.matrix + 1) * matrix_bytes;
    if fused.row_step > 1 && dtype == StoredDType::F8E4M3 {
        return Err(checkpoint.fault(&fused.name, StoredTensorError::WrongDType(dtype.name())));
    }
    let layout = StackedRowRange {
        first: fused.first_row,
        step: fused.row_step,
        count,
        transposed: fused.transposed,
    };
    Ok(WeightLocation::unscaled(fused.name.clone(), dtype, bytes, layout))
}

/// Dtypes that a stored tensor may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AllowedDTypes {
    /// F32, BF16 or F16.
    Float,
    /// F32, BF16, F16 or FP8 e4m3.
    Fp8,
    /// F32, BF16, F16 or E8M0, for weight scales.
    Scale,
    /// U8, for MXFP4 elements and their scales.
    Mxfp4,
    /// I64, for the offsets from draft token ids to target token ids.
    DraftToTarget,
}

/// Checks the dtype and shape of a stored tensor; returns its size in bytes and its dtype.
pub(super) fn check(
    checkpoint: &SafetensorsCheckpoint,
    name: &str,
    shape: &[usize],
    allowed: AllowedDTypes,
) -> Result<(usize, StoredDType), ModelLoadError> {
    let Some(stored) = checkpoint.get(name) else {
        return Err(checkpoint.fault(name, StoredTensorError::NotInFile));
    };
    let float = matches!(stored.dtype, StoredDType::F32 | StoredDType::BF16 | StoredDType::F16);
    let fp8 = allowed == AllowedDTypes::Fp8 && stored.dtype == StoredDType::F8E4M3;
    let fault = match allowed {
        AllowedDTypes::DraftToTarget if stored.dtype == StoredDType::I64 => None,
        AllowedDTypes::DraftToTarget => Some(StoredTensorError::OffsetDType(stored.dtype.name())),
        AllowedDTypes::Scale if stored.dtype == StoredDType::F8E8M0 => None,
        AllowedDTypes::Mxfp4 if stored.dtype == StoredDType::U8 => None,
        AllowedDTypes::Mxfp4 => Some(StoredTensorError::WrongDType(stored.dtype.name())),
        _ if float || fp8 => None,
        _ => Some(StoredTensorError::WrongDType(stored.dtype.name())),
    };
    if let Some(fault) = fault {
        return Err(checkpoint.fault(name, fault));
    }
    if !stored.shape.iter().copied().eq(shape.iter().map(|d| *d as u64)) {
        let expected = shape.iter().map(|d| *d as u64).collect();
        let fault = StoredTensorError::Shape { found: stored.shape.clone(), expected };
        return Err(checkpoint.fault(name, fault));
    }
    Ok((stored.bytes.len(), stored.dtype))
}

/// Checks that the stored tensor `copy` equals the stored tensor `of`; otherwise returns the error `fault`.
pub(super) fn check_same(
    checkpoint: &SafetensorsCheckpoint,
    copy: &str,
    of: &str,
    fault: StoredTensorError,
) -> Result<(), ModelLoadError> {
    let [a, b] = [copy, of].map(|name| checkpoint.get(name).map(|t| (t.dtype, &t.shape)));
    if a == b && checkpoint.bytes(copy) == checkpoint.bytes(of) {
        return Ok(());
    }
    Err(checkpoint.fault(copy, fault))
}
