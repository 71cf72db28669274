//! Sources of weight values: safetensors files, or the hash function of `synth`.
//!
//! Both sources return the slice of a weight that a rank needs, as bytes in host memory. The bytes of files
//! are those of the memory mapping, so that nothing is copied before weights are packed; only transposed
//! weights are copied.

use super::checkpoint::SafetensorsCheckpoint;
use super::header::StoredDType;
use super::scale_plan::{stored_scale, stored_values};
use super::stored_names::canonical_name;
use super::synth_shard::{synth_fp8, synth_part};
use super::tensor_plan::{StackedRowRange, WeightLocation, locate};
use crate::sharding::WeightSlice;
use crate::synth::SynthDraftVocab;
use crate::weight_table::TensorSpec;
use crate::{ModelConfig, ModelLoadError, StoredTensorError};
use ops::{ActivationScaling, DType, HostMat, OpError};
use std::borrow::Cow;
use std::collections::BTreeMap;
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
pub(crate) struct HostShard<'a> {
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
            Self::Synth { .. } => spec.quantized().is_some(),
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
    ) -> Result<HostShard<'_>, ModelLoadError> {
        match self {
            Self::Synth { seed, threads } if spec.quantized().is_some() => {
                Ok(synth_fp8(spec, slice, *seed, *threads))
            }
            Self::Synth { seed, threads } => Ok(synth_part(spec, &slice, *seed, *threads)),
            Self::Files { checkpoint, located } => located
                .get(&spec.name)
                .and_then(|location| stored_part(checkpoint, location, spec, slice))
                .ok_or_else(|| not_stored(spec)),
        }
    }

    /// Reads the KV cache scale that is stored under the first of `names` that exists. If the scale has one
    /// value per head, the maximum is returned: no head saturates with this scale, and the exponent bits of
    /// fp8 keep the precision of heads with smaller scales. Synthetic checkpoints have no KV cache scales.
    ///
    /// Errors: a scale is not a finite number above 0, or its dtype is not a float.
    pub(crate) fn scale(&self, names: &[String]) -> Result<Option<f32>, ModelLoadError> {
        let Self::Files { checkpoint, .. } = self else { return Ok(None) };
        let mut stored = names.iter().filter_map(|name| Some((name, checkpoint.get(name)?)));
        stored.next().map(|(name, stored)| stored_scale(checkpoint, name, stored)).transpose()
    }
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
) -> Option<HostShard<'a>> {
    let bytes = checkpoint.bytes(&location.stored)?;
    let dtype = match location.dtype {
        StoredDType::F32 => DType::F32,
        StoredDType::BF16 => DType::BF16,
        StoredDType::F16 => DType::F16,
        StoredDType::F8E4M3 => DType::F8E4M3,
        _ => return None, // `locate` has rejected all other dtypes.
    };
    let bytes = &bytes[location.bytes.clone()];
    let StackedRowRange { first, count, transposed } = location.layout;
    let full_shape = [count, spec.matrix()[1]];
    let bytes = match (transposed, &location.scales) {
        (true, None) => return Some(transposed_part(bytes, dtype, location.layout, &slice)),
        // The whole matrix is copied, so that blocks of scales remain whole.
        (true, Some(_)) => Cow::Owned(transposed_elements(bytes, dtype.bytes(), full_shape)),
        (false, _) => Cow::Borrowed(bytes),
    };
    let rows = first + slice.rows.start..first + slice.rows.end;
    let slice = WeightSlice { rows, ..slice };
    let scales = match (&location.scales, &spec.scales) {
        (Some(stored), Some(scales)) => {
            let block_shape = scales.format.scales.block_shape(full_shape);
            let grid = [0, 1].map(|i| full_shape[i].div_ceil(block_shape[i]));
            let mut values = stored_values(checkpoint, stored)?;
            values.drain(..location.matrix * grid[0] * grid[1]);
            values.truncate(grid[0] * grid[1]);
            if transposed {
                let stored = std::mem::take(&mut values);
                let element = |i: usize| stored[i % grid[1] * grid[0] + i / grid[1]];
                values.extend((0..stored.len()).map(element));
            }
            Some(WeightScales { values, block_shape })
        }
        _ => None,
    };
    let activation_scaling = location.activation_scaling;
    Some(HostShard { bytes, dtype, full_shape, slice, scales, activation_scaling })
}

/// Copies a matrix `[cols, rows]` of elements of `size` bytes as a matrix `[rows, cols]`.
fn transposed_elements(bytes: &[u8], size: usize, [rows, cols]: [usize; 2]) -> Vec<u8> {
    let mut copy = Vec::with_capacity(bytes.len());
    for row in 0..rows {
        for col in 0..cols {
            let start = (col * rows + row) * size;
            copy.extend_from_slice(&bytes[start..start + size]);
        }
    }
    copy
}

/// Copies a slice of a weight that is stored transposed; each row of the copy is an output channel.
fn transposed_part(
    bytes: &[u8],
    dtype: DType,
    layout: StackedRowRange,
    slice: &WeightSlice,
) -> HostShard<'static> {
    let StackedRowRange { first, count, .. } = layout;
    let size = dtype.bytes();
    let full_shape = [slice.rows.len(), slice.cols.len()];
    let mut rows = Vec::with_capacity(full_shape[0] * full_shape[1] * size);
    for row in slice.rows.clone() {
        for input in slice.cols.clone() {
            let start = (input * count + first + row) * size;
            rows.extend_from_slice(&bytes[start..start + size]);
        }
    }
    let slice =
        WeightSlice { rows: 0..full_shape[0], cols: 0..full_shape[1], padding: slice.padding };
    let (bytes, activation_scaling) = (Cow::Owned(rows), ActivationScaling::default());
    HostShard { bytes, dtype, full_shape, slice, scales: None, activation_scaling }
}

impl HostShard<'_> {
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

    /// Multiplies the weight by `factor`, by changing its scales. A static activation scale is divided by
    /// `factor`, because the inputs of the layer are divided by `factor`.
    pub(crate) fn scaled(mut self, factor: f32) -> Self {
        if let ActivationScaling::Static(scale) = &mut self.activation_scaling {
            *scale /= factor;
        }
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
