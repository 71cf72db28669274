//! Sources of weight values: safetensors files, or the hash function of `synth`.
//!
//! Both sources return the slice of a weight that a rank needs, as bytes in host memory. Bytes of files are
//! borrowed from the memory mapping, so that nothing is copied before weights are packed; only transposed
//! weights are copied.

use super::checkpoint::SafetensorsCheckpoint;
use super::header::StoredDType;
use super::mxfp4::dequantised_part;
use super::scale_plan::{stored_head_scales, stored_values_in};
use super::stored_names::canonical_name;
use super::synth_shard::{synth_fp8, synth_mxfp4, synth_part};
use super::tensor_plan::{StackedRowRange, WeightLocation, locate};
use crate::sharding::WeightSlice;
use crate::synth::SynthDraftVocab;
use crate::weight_table::TensorSpec;
use crate::{ModelConfig, ModelLoadError, StoredTensorError};
use ops::{ActivationScaling, DType, HostMat, OpError};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Source from which the values of weights are read or computed.
#[derive(Debug)]
pub(crate) enum WeightSource {
    /// Safetensors files of a model folder.
    Files {
        checkpoint: Arc<SafetensorsCheckpoint>,
        /// Location of each weight of the weight table in the files.
        located: BTreeMap<String, WeightLocation>,
    },
    /// Hash function that computes the values of synthetic checkpoints, with this seed.
    Synth {
        seed: u64,
        /// Number of threads that compute the synthetic values.
        threads: usize,
    },
}

/// This rank's part of a weight, in host memory.
#[derive(Debug)]
pub(crate) struct HostWeightShard<'a> {
    pub(super) bytes: Cow<'a, [u8]>,
    pub(super) dtype: DType,
    /// Number of rows and columns of the matrix whose elements are in `bytes`.
    pub(super) full_shape: [usize; 2],
    /// Range of rows and columns of the matrix that the rank loads.
    pub(super) slice: WeightSlice,
    /// Scales of the whole matrix; `None` if the weight is not quantised.
    pub(super) scales: Option<WeightScales>,
    /// Rule for the activation scales of the layer with this weight.
    pub(super) activation_scaling: ActivationScaling,
}

/// Dequantisation scales of a weight.
#[derive(Debug)]
pub(super) struct WeightScales {
    pub(super) values: Vec<f32>,
    /// Number of rows and columns of the weight block that shares a scale.
    pub(super) block_shape: [usize; 2],
}

impl WeightSource {
    pub(crate) fn open(
        dir: &Path,
        config: &ModelConfig,
        specs: &[TensorSpec],
    ) -> Result<Self, ModelLoadError> {
        let mut checkpoint = SafetensorsCheckpoint::open(dir)?;
        checkpoint.rename(|stored| canonical_name(config, stored))?;
        let located = locate(&checkpoint, config, specs)?;
        Ok(Self::Files { checkpoint: Arc::new(checkpoint), located })
    }

    /// Whether the source has the weight `spec`; optional weights may be missing.
    pub(crate) fn has(&self, spec: &TensorSpec) -> bool {
        match self {
            Self::Files { located, .. } => located.contains_key(&spec.name),
            Self::Synth { .. } => !spec.optional,
        }
    }

    /// Whether the source stores the weight `spec` in fp8.
    pub(crate) fn is_fp8(&self, spec: &TensorSpec) -> bool {
        match self {
            Self::Files { located, .. } => located
                .get(&spec.name)
                .is_some_and(|location| location.dtype == StoredDType::F8E4M3),
            Self::Synth { .. } => spec.quantized().is_some() && spec.may_be_fp8(),
        }
    }

    /// Reads the offsets from draft token ids to target token ids, a weight with the distribution
    /// [`SynthDistribution::Offsets`](crate::synth::SynthDistribution::Offsets).
    ///
    /// Errors: a target token id is not below `ids`, or the offsets are not stored.
    pub(crate) fn offsets(
        &self,
        spec: &TensorSpec,
        ids: usize,
    ) -> Result<Vec<i64>, ModelLoadError> {
        let count = spec.elements();
        let Self::Files { checkpoint, located } = self else {
            let draft_vocab = SynthDraftVocab { draft_ids: count, target_ids: ids };
            return Ok((0..count as u64).map(|i| draft_vocab.offset(i)).collect());
        };
        let location = located.get(&spec.name);
        let bytes = location.and_then(|location| checkpoint.bytes(&location.stored));
        let words = bytes.ok_or_else(|| not_stored(spec))?.as_chunks::<8>().0;
        let offsets: Vec<i64> = words.iter().map(|word| i64::from_le_bytes(*word)).collect();
        let id = |(i, offset): (usize, &i64)| (i as i64).checked_add(*offset);
        for (draft, offset) in offsets.iter().enumerate() {
            if !id((draft, offset)).is_some_and(|id| (0..ids as i64).contains(&id)) {
                let fault = StoredTensorError::Offset { draft, offset: *offset, ids };
                return Err(checkpoint.fault(&spec.name, fault));
            }
        }
        Ok(offsets)
    }

    /// Number of bytes that are read to load the slice `slice` of the weight `spec`.
    pub(crate) fn bytes(&self, spec: &TensorSpec, slice: &WeightSlice) -> u64 {
        let size = match self {
            _ if !self.has(spec) => 0,
            Self::Files { located, .. }
                if located.get(&spec.name).is_some_and(|l| l.dtype == StoredDType::U8) =>
            {
                return slice.elements() as u64 / 2; // Two MXFP4 elements per byte.
            }
            Self::Synth { .. } if spec.quantized_mxfp4().is_some() => DType::BF16.bytes() as u64,
            Self::Files { located, .. } => located.get(&spec.name).map_or(0, |l| l.dtype.bytes()),
            Self::Synth { .. } if spec.quantized().is_some() => DType::F8E4M3.bytes() as u64,
            Self::Synth { .. } => DType::BF16.bytes() as u64,
        };
        slice.elements() as u64 * size
    }

    /// Returns the slice `slice` of the weight `spec`, in host memory.
    pub(crate) fn part(
        &self,
        spec: &TensorSpec,
        slice: WeightSlice,
    ) -> Result<HostWeightShard<'_>, ModelLoadError> {
        match self {
            Self::Synth { seed, threads } if spec.quantized_mxfp4().is_some() => {
                Ok(synth_mxfp4(spec, &slice, *seed, *threads))
            }
            Self::Synth { seed, threads } if spec.quantized().is_some() => {
                Ok(synth_fp8(spec, slice, *seed, *threads))
            }
            Self::Synth { seed, threads } => Ok(synth_part(spec, &slice, *seed, *threads)),
            Self::Files { checkpoint, located } => {
                let location = located.get(&spec.name).ok_or_else(|| not_stored(spec))?;
                let part = match location.dtype {
                    StoredDType::U8 => dequantised_part(checkpoint, location, spec, &slice)?,
                    _ => stored_part(checkpoint, location, spec, slice),
                };
                part.ok_or_else(|| not_stored(spec))
            }
        }
    }

    /// Reads the KV cache scales that are stored under the first of `names` that exists: one scale, or `heads`
    /// scales if they differ. Synthetic checkpoints have no KV cache scales.
    ///
    /// Errors: a scale is not a finite number above 0, their dtype is not a float, or their number is neither 1
    /// nor `heads`.
    pub(crate) fn head_scales(
        &self,
        names: &[String],
        heads: usize,
    ) -> Result<Option<Vec<f32>>, ModelLoadError> {
        let Self::Files { checkpoint, .. } = self else { return Ok(None) };
        let mut stored = names.iter().filter_map(|name| Some((name, checkpoint.get(name)?)));
        let Some((name, stored)) = stored.next() else { return Ok(None) };
        stored_head_scales(checkpoint, name, stored, heads).map(Some)
    }
}

/// Returns the greatest common divisor of two numbers above 0.
fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if a.is_multiple_of(b) { b } else { greatest_common_divisor(b, a % b) }
}

/// Error for a weight that the checkpoint does not store.
fn not_stored(spec: &TensorSpec) -> ModelLoadError {
    ModelLoadError::table(&spec.name, "is not stored")
}

/// Slice of the weight at `location`, borrowed from the memory mapping unless the weight is stored
/// transposed; `None` if the tensor or its scales are not stored.
fn stored_part<'a>(
    checkpoint: &'a SafetensorsCheckpoint,
    location: &WeightLocation,
    spec: &TensorSpec,
    slice: WeightSlice,
) -> Option<HostWeightShard<'a>> {
    let bytes = checkpoint.bytes(&location.stored)?;
    let dtype = match location.dtype {
        StoredDType::F32 => DType::F32,
        StoredDType::BF16 => DType::BF16,
        StoredDType::F16 => DType::F16,
        StoredDType::F8E4M3 => DType::F8E4M3,
        _ => return None, // `locate` has rejected all other dtypes.
    };
    let bytes = &bytes[location.bytes.clone()];
    let StackedRowRange { first, step, count, transposed } = location.layout;
    let full_shape = [count, spec.matrix()[1]];
    let first = first + slice.rows.start * step;
    let rows = first..first + slice.rows.len();
    let slice = WeightSlice { rows, ..slice };
    let scales = match &location.scales {
        Some(_) => Some(stored_scales(checkpoint, location, spec, full_shape)?),
        None => None,
    };
    let activation_scaling = location.activation_scaling;
    let bytes = Cow::Borrowed(bytes);
    let part = HostWeightShard { bytes, dtype, full_shape, slice, scales, activation_scaling };
    Some(if transposed { transposed_part(&part, step) } else { part })
}

/// Scales of the matrix `[rows, cols]` that contains the weight at `location`; `None` if they are not stored.
fn stored_scales(
    checkpoint: &SafetensorsCheckpoint,
    location: &WeightLocation,
    spec: &TensorSpec,
    matrix: [usize; 2],
) -> Option<WeightScales> {
    let block_shape = spec.scales.as_ref()?.format.scales.block_shape(matrix);
    let [rows, cols] = [0, 1].map(|i| matrix[i].div_ceil(block_shape[i]));
    let range = location.first_scale..location.first_scale + rows * cols;
    let mut values = stored_values_in(checkpoint, location.scales.as_ref()?, range)?;
    if location.layout.transposed {
        let element = |i: usize| values[i % cols * rows + i / cols];
        values = (0..rows * cols).map(element).collect();
    }
    Some(WeightScales { values, block_shape })
}

/// Copies the slice of a weight that is stored as the transposed matrix `[cols, rows]`, in which successive rows of
/// the weight are `step` columns apart. The copy contains whole scale blocks; each row of the copy is an output
/// channel.
fn transposed_part(part: &HostWeightShard<'_>, step: usize) -> HostWeightShard<'static> {
    const TILE: usize = 64;
    let (size, [_, full_cols]) = (part.dtype.bytes(), part.full_shape);
    let block = part.scales.as_ref().map_or([1, 1], |scales| scales.block_shape);
    let widened = |range: &Range<usize>, i: usize| {
        let end = range.end.next_multiple_of(block[i]).min(part.full_shape[i]);
        range.start / block[i] * block[i]..end
    };
    let (rows, cols) = (widened(&part.slice.rows, 0), widened(&part.slice.cols, 1));
    let mut copy = vec![0; rows.len() * cols.len() * size];
    // A tile of rows and columns fits in the cache, so that each stored row is read once.
    for first_row in rows.clone().step_by(TILE) {
        for col in cols.clone() {
            for row in first_row..rows.end.min(first_row + TILE) {
                let stored_row = rows.start + (row - rows.start) * step;
                let from = (col * part.full_shape[0] + stored_row) * size;
                let to = ((row - rows.start) * cols.len() + col - cols.start) * size;
                copy[to..to + size].copy_from_slice(&part.bytes[from..from + size]);
            }
        }
    }
    let scales = part.scales.as_ref().map(|scales| {
        let grid_cols = full_cols.div_ceil(block[1]);
        let blocks =
            |range: &Range<usize>, i: usize| range.start / block[i]..range.end.div_ceil(block[i]);
        let in_row = |r: usize| blocks(&cols, 1).map(move |c| r * grid_cols + c);
        let indices = blocks(&rows, 0).flat_map(in_row);
        WeightScales { values: indices.map(|i| scales.values[i]).collect(), block_shape: block }
    });
    let inside = |range: &Range<usize>, start: usize| range.start - start..range.end - start;
    let slice = WeightSlice {
        rows: inside(&part.slice.rows, rows.start),
        cols: inside(&part.slice.cols, cols.start),
        padding: part.slice.padding,
    };
    HostWeightShard {
        bytes: Cow::Owned(copy),
        dtype: part.dtype,
        full_shape: [rows.len(), cols.len()],
        slice,
        scales,
        activation_scaling: part.activation_scaling,
    }
}

impl HostWeightShard<'static> {
    /// Creates the shard of an unscaled weight from `bytes`, the bf16 elements of its slice `slice` in row-major order.
    pub(super) fn bf16(bytes: Vec<u8>, slice: &WeightSlice) -> Self {
        let full_shape = [slice.rows.len(), slice.cols.len()];
        let [rows, cols] = full_shape.map(|n| 0..n);
        Self {
            bytes: Cow::Owned(bytes),
            dtype: DType::BF16,
            full_shape,
            slice: WeightSlice { rows, cols, padding: slice.padding },
            scales: None,
            activation_scaling: ActivationScaling::default(),
        }
    }
}

impl HostWeightShard<'_> {
    /// This rank's rows and columns of the matrix, without padding rows.
    pub(crate) fn matrix(&self) -> Result<HostMat<'_>, OpError> {
        let [rows, cols] = self.full_shape;
        let mut matrix = HostMat::new(&self.bytes, self.dtype, rows, cols)?
            .with_activation_scaling(self.activation_scaling);
        if let Some(scales) = &self.scales {
            matrix = matrix.scaled(&scales.values, scales.block_shape)?;
        }
        let WeightSlice { rows, cols, .. } = &self.slice;
        Ok(matrix.row_range(rows.start, rows.len()).column_range(cols.start, cols.len()))
    }

    /// Multiplies the columns of the weight by `factors`, each of which belongs to an equally long range of
    /// columns, by changing the scales.
    pub(crate) fn scaled(self, factors: &[f32]) -> Self {
        match factors {
            [factor] => self.scaled_by(*factor),
            factors => self.scaled_by_columns(factors),
        }
    }

    /// Multiplies the columns of the weight by `factors`. Static activation scales become dynamic, because one
    /// scale cannot be divided by several factors. If the blocks that share a scale are larger than a range, they
    /// are divided, in fp8 into blocks of 128 rows and 128 columns if possible.
    fn scaled_by_columns(mut self, factors: &[f32]) -> Self {
        const BLOCK: usize = 128;
        let [rows, cols] = self.full_shape.map(|n| n.max(1));
        let width = cols / factors.len();
        let old = self.scales.take();
        let old = old.unwrap_or(WeightScales { values: vec![1.0], block_shape: [rows, cols] });
        let [old_rows, old_cols] = old.block_shape;
        let is_whole = old_rows >= rows && self.dtype == DType::F8E4M3;
        let block_rows = if is_whole { BLOCK } else { old_rows };
        let unit = greatest_common_divisor(width, BLOCK);
        let block_cols =
            if old_cols >= cols { unit } else { greatest_common_divisor(old_cols, unit) };
        let stride = cols.div_ceil(old_cols);
        let value = |row: usize, col: usize| {
            old.values[row / old_rows * stride + col / old_cols] * factors[col / width]
        };
        let values = (0..rows)
            .step_by(block_rows)
            .flat_map(|row| (0..cols).step_by(block_cols).map(move |col| [row, col]))
            .map(|[row, col]| value(row, col))
            .collect();
        self.scales = Some(WeightScales { values, block_shape: [block_rows, block_cols] });
        if matches!(self.activation_scaling, ActivationScaling::Static(_)) {
            self.activation_scaling = ActivationScaling::default();
        }
        self
    }

    /// Multiplies the weight by `factor`, by changing its scales. A static activation scale is divided by
    /// `factor`, because the inputs of the layer are divided by `factor`.
    fn scaled_by(mut self, factor: f32) -> Self {
        if let ActivationScaling::Static(scale) = &mut self.activation_scaling {
            *scale /= factor;
        }
        self.with_outputs_scaled(factor)
    }

    /// Multiplies the outputs of the layer by `factor`, by changing the scales of the weight.
    pub(super) fn with_outputs_scaled(mut self, factor: f32) -> Self {
        match &mut self.scales {
            _ if factor.to_bits() == 1f32.to_bits() => {}
            Some(scales) => scales.values.iter_mut().for_each(|scale| *scale *= factor),
            // A weight without scales is given one scale for the whole matrix.
            none => {
                let block_shape = self.full_shape.map(|n| n.max(1));
                *none = Some(WeightScales { values: vec![factor], block_shape });
            }
        }
        self
    }

    /// Whether the weight is stored in fp8.
    pub(crate) fn is_fp8(&self) -> bool {
        self.dtype == DType::F8E4M3
    }

    /// Number of zero rows that are appended to this rank's rows as vocabulary padding.
    pub(crate) fn padding(&self) -> usize {
        self.slice.padding
    }

    /// This rank's part of a vector, converted to f32.
    pub(crate) fn vector(&self) -> Result<Vec<f32>, OpError> {
        let matrix = self.matrix()?;
        let mut values = vec![0.0; matrix.rows()];
        for (r, value) in values.iter_mut().enumerate() {
            matrix.read_row(r, std::slice::from_mut(value));
        }
        Ok(values)
    }
}
