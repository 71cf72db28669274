//! Multi-threaded computation of this rank's part of a synthetic weight.

use super::mxfp4::dequantised;
use super::source::{HostWeightShard, WeightScales};
use crate::config::{ActivationScheme, MXFP4_GROUP};
use crate::sharding::WeightSlice;
use crate::synth::{SynthDistribution, SynthValueGenerator, mxfp4_generators};
use crate::weight_table::TensorSpec;
use half::bf16;
use ops::{ActivationScaling, DType};
use std::borrow::Cow;
use std::thread;

/// Computes a slice of a synthetic weight in bf16, which represents the values exactly.
pub(super) fn synth_part(
    spec: &TensorSpec,
    slice: &WeightSlice,
    seed: u64,
    threads: usize,
) -> HostWeightShard<'static> {
    let [_, inputs] = spec.matrix();
    let generator = SynthValueGenerator::new(&spec.name, seed, spec.values, inputs);
    let bytes =
        synth_bytes(inputs, slice, threads, |i| bf16::from_f32(generator.value(i)).to_le_bytes());
    HostWeightShard::bf16(bytes, slice)
}

/// Computes a quantised synthetic weight. All elements are computed, not only the slice, because a scale
/// block may extend over several slices.
pub(super) fn synth_fp8(
    spec: &TensorSpec,
    slice: WeightSlice,
    seed: u64,
    threads: usize,
) -> HostWeightShard<'static> {
    let full_shape = spec.matrix();
    let generator = SynthValueGenerator::new(&spec.name, seed, spec.values, full_shape[1]);
    let all = WeightSlice { rows: 0..full_shape[0], cols: 0..full_shape[1], padding: 0 };
    let bytes = synth_bytes(full_shape[1], &all, threads, |i| [generator.e4m3(i)]);
    let scales = spec.scales.as_ref().map(|scales| {
        let name = spec.scale_names(scales.format).next().unwrap_or_default();
        let generator =
            SynthValueGenerator::new(&name, seed, SynthDistribution::Scale, full_shape[1]);
        let count: usize = spec.scale_shape(scales.format).iter().product();
        let values = (0..count as u64).map(|i| generator.value(i)).collect();
        WeightScales { values, block_shape: scales.format.scales.block_shape(full_shape) }
    });
    let activation_scaling = synth_activation_scaling(spec, seed);
    let (bytes, dtype) = (Cow::Owned(bytes), DType::F8E4M3);
    HostWeightShard { bytes, dtype, full_shape, slice, scales, activation_scaling }
}

/// Computes a slice of a synthetic MXFP4 weight, dequantised to bf16, which represents the values exactly.
pub(super) fn synth_mxfp4(
    spec: &TensorSpec,
    slice: &WeightSlice,
    seed: u64,
    threads: usize,
) -> HostWeightShard<'static> {
    let [_, inputs] = spec.matrix();
    let groups = inputs.div_ceil(MXFP4_GROUP) as u64;
    let [elements, scales] = mxfp4_generators(spec, seed);
    let bytes = synth_bytes(inputs, slice, threads, |i| {
        let (row, col) = (i / inputs as u64, i % inputs as u64);
        dequantised(elements.e2m1(i), scales.e8m0(row * groups + col / MXFP4_GROUP as u64))
    });
    HostWeightShard::bf16(bytes, slice)
}

/// Returns the activation scaling of a quantised synthetic weight; a static input scale is synthetic, too.
fn synth_activation_scaling(spec: &TensorSpec, seed: u64) -> ActivationScaling {
    match spec.scales.as_ref().map(|scales| scales.format.activations) {
        Some(ActivationScheme::PowerOfTwo) => ActivationScaling::PowerOfTwo,
        Some(ActivationScheme::Static) => {
            let [name, _] = spec.input_scale_names();
            let [_, inputs] = spec.matrix();
            let generator =
                SynthValueGenerator::new(&name, seed, SynthDistribution::InputScale, inputs);
            ActivationScaling::Static(generator.value(0))
        }
        Some(ActivationScheme::Dynamic) | None => ActivationScaling::Dynamic,
    }
}

/// Computes the elements of a slice of a synthetic matrix with `inputs` columns, row by row.
fn synth_bytes<const SIZE: usize>(
    inputs: usize,
    slice: &WeightSlice,
    threads: usize,
    element: impl Fn(u64) -> [u8; SIZE] + Sync,
) -> Vec<u8> {
    let (rows, cols) = (slice.rows.len(), slice.cols.len());
    let row_bytes = cols * SIZE;
    let mut bytes = vec![0; rows * row_bytes];
    let rows_each = rows.div_ceil(threads.max(1)).max(1);
    thread::scope(|scope| {
        for (i, bytes) in bytes.chunks_mut((rows_each * row_bytes).max(1)).enumerate() {
            let element = &element;
            scope.spawn(move || {
                let first = slice.rows.start + i * rows_each;
                for (r, row) in bytes.chunks_mut(row_bytes.max(1)).enumerate() {
                    let start = ((first + r) * inputs + slice.cols.start) as u64;
                    for (j, out) in row.as_chunks_mut::<SIZE>().0.iter_mut().enumerate() {
                        *out = element(start + j as u64);
                    }
                }
            });
        }
    });
    bytes
}
