//! Multi-threaded computation of this rank's part of a synthetic weight.

use super::source::{HostWeightShard, WeightScales};
use crate::config::ActivationScheme;
use crate::sharding::WeightSlice;
use crate::synth::{SynthDistribution, SynthValueGenerator};
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
    let full_shape = [slice.rows.len(), slice.cols.len()];
    let slice =
        WeightSlice { rows: 0..full_shape[0], cols: 0..full_shape[1], padding: slice.padding };
    let (bytes, dtype) = (Cow::Owned(bytes), DType::BF16);
    let activation_scaling = ActivationScaling::default();
    HostWeightShard { bytes, dtype, full_shape, slice, scales: None, activation_scaling }
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
    let activation_scaling = match spec.scales.as_ref().map(|scales| scales.format.activations) {
        Some(ActivationScheme::PowerOfTwo) => ActivationScaling::PowerOfTwo,
        Some(ActivationScheme::Static) => {
            let [name, _] = spec.input_scale_names();
            let generator =
                SynthValueGenerator::new(&name, seed, SynthDistribution::InputScale, full_shape[1]);
            ActivationScaling::Static(generator.value(0))
        }
        Some(ActivationScheme::Dynamic) | None => ActivationScaling::Dynamic,
    };
    let (bytes, dtype) = (Cow::Owned(bytes), DType::F8E4M3);
    HostWeightShard { bytes, dtype, full_shape, slice, scales, activation_scaling }
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
