//! Assignment of stored scales to quantised weights: weight scales and static activation scales.

use super::checkpoint::SafetensorsCheckpoint;
use super::fused_weight::FusedWeightLocation;
use super::header::{StoredDType, StoredTensor};
use super::tensor_plan::{AllowedDTypes, check, check_same};
use crate::ModelLoadError;
use crate::config::{ActivationScheme, CheckpointScaleGranularity, LayerQuantization};
use crate::error::StoredTensorError;
use crate::weight_table::{ScaleSpec, TensorSpec};
use ops::{ActivationScaling, DType, HostMat};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

/// Scales of a quantised weight in a checkpoint.
pub(super) struct LocatedScales {
    /// Name of the stored tensor with the weight scales.
    pub(super) weight: String,
    /// Rule for the activation scales.
    pub(super) activation_scaling: ActivationScaling,
}

/// Names of missing weights and of used tensors, collected while weights are located.
#[derive(Default)]
pub(super) struct MissingAndUsedTensors {
    /// Tensors of the weight table that are not stored.
    pub(super) missing: Vec<String>,
    /// Stored tensors that are assigned to weights.
    pub(super) used: BTreeSet<String>,
}

/// Tensor whose scales apply to a weight: the weight, or the fused tensor that contains it.
pub(super) struct ScaleOwner<'a> {
    spec: Cow<'a, TensorSpec>,
    /// Shape of the scales of a fused tensor of experts; `None` = the tensor is one matrix.
    of_experts: Option<[usize; 3]>,
    /// Index of the first scale of the stored matrix that contains the weight.
    pub(super) first_scale: usize,
}

impl<'a> ScaleOwner<'a> {
    /// The weight `spec` has scales of its own.
    pub(super) fn weight(spec: &'a TensorSpec) -> Self {
        Self { spec: Cow::Borrowed(spec), of_experts: None, first_scale: 0 }
    }

    /// The weight `spec` is stored in the fused tensor `fused`.
    pub(super) fn fused(
        spec: &TensorSpec,
        fused: &FusedWeightLocation,
        format: LayerQuantization,
    ) -> Self {
        let of_experts = fused.expert_scale_shape(spec.matrix(), format);
        let per_expert = of_experts.map_or(0, |[_, rows, cols]| rows * cols);
        let spec = Cow::Owned(fused.stored_spec(spec));
        Self { spec, of_experts, first_scale: fused.matrix * per_expert }
    }

    /// The weight `spec` is stored separately. Its scales are separate too, or they are stored in one tensor for all experts
    /// of the layer, as transformers writes models that it quantised (`FineGrainedFP8Config`).
    pub(super) fn separate(
        checkpoint: &SafetensorsCheckpoint,
        spec: &'a TensorSpec,
        fused: &FusedWeightLocation,
        format: LayerQuantization,
    ) -> Self {
        let is_stored = |spec: &TensorSpec| {
            spec.scale_names(format).any(|name| checkpoint.get(&name).is_some())
        };
        let block = format.scales.block_shape([fused.rows, spec.matrix()[1]]);
        let has_own_blocks = fused.first_row.is_multiple_of(block[0]) && !fused.transposed;
        let all = Self::fused(spec, fused, format);
        match all.of_experts {
            Some([_, _, cols]) if has_own_blocks && !is_stored(spec) && is_stored(&all.spec) => {
                let first_scale = all.first_scale + fused.first_row / block[0] * cols;
                Self { first_scale, ..all }
            }
            _ => Self::weight(spec),
        }
    }
}

/// Locates the scales of a weight, which belong to the tensor `owner`. If a required scale is not stored, adds its name to
/// the missing tensors of `coverage` and returns `None`.
///
/// Errors: a scale has a wrong shape or dtype, or a scale is stored under two names with different values.
pub(super) fn locate_scales(
    checkpoint: &SafetensorsCheckpoint,
    owner: &ScaleOwner<'_>,
    scales: &ScaleSpec,
    coverage: &mut MissingAndUsedTensors,
) -> Result<Option<LocatedScales>, ModelLoadError> {
    let ScaleOwner { spec, of_experts, .. } = owner;
    let names: Vec<String> = spec.scale_names(scales.format).collect();
    let Some(weight) = assign(checkpoint, &names, coverage)? else { return Ok(None) };
    match of_experts {
        Some(shape) => check(checkpoint, &weight, shape, AllowedDTypes::Scale).map(drop)?,
        None => check_scales(checkpoint, spec, scales, &weight)?,
    }
    let activation_scaling = match scales.format.activations {
        ActivationScheme::Dynamic => ActivationScaling::Dynamic,
        ActivationScheme::PowerOfTwo => ActivationScaling::PowerOfTwo,
        ActivationScheme::Static => {
            let name = assign(checkpoint, &spec.input_scale_names(), coverage)?;
            let stored = name.as_ref().and_then(|name| Some((name, checkpoint.get(name)?)));
            let Some((name, stored)) = stored else { return Ok(None) };
            // Fused experts have one scale for all experts, or one per expert. All experts of a layer use the
            // largest, as unfused experts do.
            let mut shape = vec![1; stored.shape.len()];
            if let (Some([experts, ..]), Some(first)) = (of_experts, shape.first_mut())
                && stored.shape.first() != Some(&1)
            {
                *first = *experts;
            }
            check(checkpoint, name, &shape, AllowedDTypes::Float)?;
            ActivationScaling::Static(stored_scale(checkpoint, name, stored)?)
        }
    };
    Ok(Some(LocatedScales { weight, activation_scaling }))
}

/// Returns the first of `names` that is stored, and marks all stored tensors with these names as used. If no
/// such tensor is stored, adds the first name to the missing tensors and returns `None`.
///
/// Errors: tensors are stored under several of these names, and their values differ.
fn assign(
    checkpoint: &SafetensorsCheckpoint,
    names: &[String],
    coverage: &mut MissingAndUsedTensors,
) -> Result<Option<String>, ModelLoadError> {
    let mut stored = names.iter().filter(|name| checkpoint.get(name).is_some());
    let Some(first) = stored.next() else {
        coverage.missing.extend(names.first().cloned());
        return Ok(None);
    };
    coverage.used.insert(first.clone());
    for other in stored {
        check_same(checkpoint, other, first, StoredTensorError::ScaleSpelling(first.clone()))?;
        coverage.used.insert(other.clone());
    }
    Ok(Some(first.clone()))
}

/// Checks the dtype and shape of the scales of a weight. Scales per row may be stored with the shape `[rows]`
/// or `[rows, 1]`, a single scale with the shape `[]`, `[1]` or `[1, 1]`, and scales per block with the shape
/// `[rows, cols]` or, by ModelOpt, `[rows, 1, cols, 1]`.
fn check_scales(
    checkpoint: &SafetensorsCheckpoint,
    spec: &TensorSpec,
    scales: &ScaleSpec,
    name: &str,
) -> Result<(), ModelLoadError> {
    let [rows, cols] = spec.scale_shape(scales.format);
    let dims = checkpoint.get(name).map_or(2, |stored| stored.shape.len());
    let is_scalar = scales.format.scales == CheckpointScaleGranularity::Tensor;
    let has_blocks = scales.format.scales == CheckpointScaleGranularity::Blocks;
    let shape: &[usize] = match dims {
        0 if is_scalar => &[],
        1 if cols == 1 => &[rows],
        4 if has_blocks => &[rows, 1, cols, 1],
        _ => &[rows, cols],
    };
    check(checkpoint, name, shape, AllowedDTypes::Scale).map(drop)
}

/// Reads a scale; returns the maximum if the tensor has several values.
///
/// Errors: a value is not a normal, finite number above 0, or the dtype is not a float.
fn stored_scale(
    checkpoint: &SafetensorsCheckpoint,
    name: &str,
    stored: &StoredTensor,
) -> Result<f32, ModelLoadError> {
    let values = checked_scales(checkpoint, name, stored)?;
    Ok(values.into_iter().fold(0.0, f32::max))
}

/// Reads the scales of `heads` heads, stored in any shape; returns one scale if all are equal.
///
/// Errors: a value is not a normal, finite number above 0, the dtype is not a float, or the number of values is
/// neither 1 nor `heads`.
pub(super) fn stored_head_scales(
    checkpoint: &SafetensorsCheckpoint,
    name: &str,
    stored: &StoredTensor,
    heads: usize,
) -> Result<Vec<f32>, ModelLoadError> {
    let values = checked_scales(checkpoint, name, stored)?;
    if values.len() != 1 && values.len() != heads {
        let fault = StoredTensorError::HeadScales { got: values.len(), heads };
        return Err(checkpoint.fault(name, fault));
    }
    let is_common = values.iter().all(|value| value.to_bits() == values[0].to_bits());
    Ok(if is_common { vec![values[0]] } else { values })
}

/// Reads scales that are normal, finite numbers above 0; at least one.
fn checked_scales(
    checkpoint: &SafetensorsCheckpoint,
    name: &str,
    stored: &StoredTensor,
) -> Result<Vec<f32>, ModelLoadError> {
    let fault = |fault| Err(checkpoint.fault(name, fault));
    let Some(values) = stored_values(checkpoint, name).filter(|values| !values.is_empty()) else {
        return fault(StoredTensorError::WrongDType(stored.dtype.name()));
    };
    // Subnormal scales are rejected, because their inverse may be infinite.
    match values.iter().find(|value| !(value.is_finite() && **value >= f32::MIN_POSITIVE)) {
        Some(value) => fault(StoredTensorError::Scale(value.to_string())),
        None => Ok(values),
    }
}

/// Values of a stored tensor of a float dtype or of E8M0 (powers of two), converted to f32; `None` for other
/// dtypes.
fn stored_values(checkpoint: &SafetensorsCheckpoint, name: &str) -> Option<Vec<f32>> {
    let elements = checkpoint.get(name)?.shape.iter().product::<u64>() as usize;
    stored_values_in(checkpoint, name, 0..elements)
}

/// Values of the elements `range` of a stored tensor, as `stored_values` converts them.
pub(super) fn stored_values_in(
    checkpoint: &SafetensorsCheckpoint,
    name: &str,
    range: Range<usize>,
) -> Option<Vec<f32>> {
    let (stored, bytes) = (checkpoint.get(name)?, checkpoint.bytes(name)?);
    let size = stored.dtype.bytes() as usize;
    let bytes = bytes.get(range.start * size..range.end * size)?;
    let dtype = match stored.dtype {
        StoredDType::F32 => DType::F32,
        StoredDType::BF16 => DType::BF16,
        StoredDType::F16 => DType::F16,
        StoredDType::F8E8M0 => return Some(bytes.iter().copied().map(e8m0).collect()),
        _ => return None,
    };
    let mut values = vec![0.0; range.len()];
    HostMat::new(bytes, dtype, 1, values.len()).ok()?.read_row(0, &mut values);
    Some(values)
}

/// Value of an E8M0 number: `2^(bits − 127)`; the encoding 255 is NaN (OCP Microscaling Formats 1.0, section
/// 5.4.1).
pub(super) fn e8m0(bits: u8) -> f32 {
    match bits {
        u8::MAX => f32::NAN,
        0 => f32::from_bits(1 << 22), // 2^-127 is subnormal.
        bits => f32::from_bits(u32::from(bits) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e8m0_numbers_are_powers_of_two() {
        let numbers = [0, 1, 126, 127, 128, 254].map(e8m0);
        let powers = [-127, -126, -1, 0, 1, 127].map(|e| 2f64.powi(e) as f32);
        assert_eq!(numbers, powers);
        assert!(e8m0(255).is_nan());
    }
}
