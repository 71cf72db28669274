//! Weights in MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6): 4-bit E2M1 elements, of which 32 successive
//! ones of a row share an E8M0 scale. The loader dequantises them to bf16, which represents every finite value exactly.
//!
//! gpt-oss checkpoints have two tensors per projection of a layer: `…_blocks`, U8 `[experts, rows, columns / 32, 16]`
//! with the even element of a pair in the low half of a byte, and `…_scales`, U8 `[experts, rows, columns / 32]`.

use super::checkpoint::SafetensorsCheckpoint;
use super::fused_weight::FusedWeightLocation;
use super::header::StoredDType;
use super::scale_plan::e8m0;
use super::source::HostWeightShard;
use super::tensor_plan::{AllowedDTypes, StackedRowRange, WeightLocation, check};
use crate::ModelLoadError;
use crate::config::MXFP4_GROUP;
use crate::error::StoredTensorError;
use crate::sharding::WeightSlice;
use crate::weight_table::TensorSpec;
use half::bf16;
use ops::{ActivationScaling, DType};

/// Suffix of the tensor with the elements.
pub(crate) const BLOCKS: &str = "_blocks";
/// Suffix of the tensor with the scales.
pub(crate) const SCALES: &str = "_scales";
/// Largest scale, 2^125, for which every element is finite in bf16: the largest element is 6.
const SCALE_MAX: u8 = 252;
/// Number of bytes of the elements of a group.
pub(crate) const GROUP_BYTES: usize = MXFP4_GROUP / 2;

/// Locates a weight whose fused tensor is stored in MXFP4; `None` if it is not, or the configuration does not
/// declare this format.
///
/// Errors: the dtype or shape of the elements or of the scales is wrong.
pub(super) fn locate_mxfp4(
    checkpoint: &SafetensorsCheckpoint,
    spec: &TensorSpec,
    fused: Option<&FusedWeightLocation>,
) -> Result<Option<WeightLocation>, ModelLoadError> {
    let is_mxfp4 = spec.scales.as_ref().is_some_and(|scales| !scales.format.is_fp8());
    let Some((fused, experts)) = fused.filter(|_| is_mxfp4).and_then(|f| Some((f, f.experts?)))
    else {
        return Ok(None);
    };
    let [blocks, scales] = [BLOCKS, SCALES].map(|suffix| format!("{}{suffix}", fused.name));
    if checkpoint.get(&blocks).is_none() {
        return Ok(None);
    }
    let [_, cols] = spec.matrix();
    let groups = cols.div_ceil(MXFP4_GROUP);
    let grid = [experts, fused.rows, groups];
    check(checkpoint, &scales, &grid, AllowedDTypes::Mxfp4)?;
    let shape = [experts, fused.rows, groups, GROUP_BYTES];
    check(checkpoint, &blocks, &shape, AllowedDTypes::Mxfp4)?;
    let matrix_bytes = fused.rows * groups * GROUP_BYTES;
    Ok(Some(WeightLocation {
        stored: blocks,
        dtype: StoredDType::U8,
        bytes: fused.matrix * matrix_bytes..(fused.matrix + 1) * matrix_bytes,
        layout: StackedRowRange {
            first: fused.first_row,
            step: fused.row_step,
            count: fused.rows,
            transposed: false,
        },
        scales: Some(scales),
        first_scale: fused.matrix * fused.rows * groups,
        activation_scaling: ActivationScaling::default(),
    }))
}

/// Reads the slice `slice` of the MXFP4 weight at `location` and dequantises it to bf16. `None` if the tensors are
/// not stored.
///
/// Errors: a scale is NaN, or so large that elements may be infinite.
pub(super) fn dequantised_part(
    checkpoint: &SafetensorsCheckpoint,
    location: &WeightLocation,
    spec: &TensorSpec,
    slice: &WeightSlice,
) -> Result<Option<HostWeightShard<'static>>, ModelLoadError> {
    let stored = || Some((checkpoint.bytes(&location.stored)?, location.scales.as_ref()?));
    let Some((bytes, name)) = stored() else { return Ok(None) };
    let Some(scales) = checkpoint.bytes(name) else { return Ok(None) };
    let groups = spec.matrix()[1].div_ceil(MXFP4_GROUP);
    let StackedRowRange { first, step, count, .. } = location.layout;
    let blocks = &bytes[location.bytes.clone()];
    let scales = &scales[location.first_scale..location.first_scale + count * groups];
    let mut values = Vec::with_capacity(slice.elements() * DType::BF16.bytes());
    for row in slice.rows.clone() {
        let row = first + row * step;
        let scales = &scales[row * groups..(row + 1) * groups];
        if let Some(&scale) = scales.iter().find(|&&scale| scale > SCALE_MAX) {
            let value = e8m0(scale).to_string();
            return Err(checkpoint.fault(name, StoredTensorError::Scale(value)));
        }
        let blocks = &blocks[row * groups * GROUP_BYTES..(row + 1) * groups * GROUP_BYTES];
        let used = slice.cols.start / MXFP4_GROUP..slice.cols.end.div_ceil(MXFP4_GROUP);
        for (group, &scale) in used.clone().zip(&scales[used]) {
            let table: [[u8; 2]; 16] =
                std::array::from_fn(|element| dequantised(element as u8, scale));
            let first = slice.cols.start.max(group * MXFP4_GROUP);
            for col in first..slice.cols.end.min((group + 1) * MXFP4_GROUP) {
                let element = blocks[col / 2] >> (col % 2 * 4) & 15;
                values.extend_from_slice(&table[usize::from(element)]);
            }
        }
    }
    Ok(Some(HostWeightShard::bf16(values, slice)))
}

/// Bytes of the E8M0 scales of the rows from the first to the last row of the slice `slice`; `None` if the weight is
/// not stored in MXFP4.
pub(super) fn group_scales<'a>(
    checkpoint: &'a SafetensorsCheckpoint,
    location: &WeightLocation,
    spec: &TensorSpec,
    slice: &WeightSlice,
) -> Option<&'a [u8]> {
    let name = location.scales.as_ref().filter(|_| location.dtype == StoredDType::U8)?;
    let groups = spec.matrix()[1].div_ceil(MXFP4_GROUP);
    let rows = location.layout.span(slice);
    let first = location.first_scale;
    checkpoint.bytes(name)?.get(first + rows.start * groups..first + rows.end * groups)
}

/// Returns the bf16 value of an E2M1 element (the low 4 bits of `element`) with the E8M0 scale `scale`.
pub(crate) fn dequantised(element: u8, scale: u8) -> [u8; 2] {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES[usize::from(element & 7)] * e8m0(scale);
    bf16::from_f32(if element & 8 == 0 { magnitude } else { -magnitude }).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mxfp4_value_is_exact_in_bf16() {
        let value = |element, scale| bf16::from_le_bytes(dequantised(element, scale)).to_f64();
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (scale, exponent) in [(0, -127), (1, -126), (120, -7), (127, 0), (250, 123), (252, 125)]
        {
            for (element, magnitude) in (0u8..).zip(magnitudes) {
                let expected = magnitude * 2f64.powi(exponent);
                assert_eq!(value(element, scale), expected, "{element} at {scale}");
                assert_eq!(value(element | 8, scale), -expected, "{element} at {scale}");
            }
        }
        assert!(value(7, SCALE_MAX).is_finite() && !value(7, SCALE_MAX + 1).is_finite());
    }
}
