//! Where the values of weights come from: files, or the hash of `synth`.
//!
//! Both answer the same question, "the slice of this weight that a rank holds", as bytes on the host.
//! Files answer with borrowed bytes of the mapping, so that nothing is copied before it is packed.

use super::checkpoint::Checkpoint;
use super::header::StoredDType;
use super::plan::{Located, locate};
use crate::sharding::Slice;
use crate::synth::Generator;
use crate::table::TensorSpec;
use crate::{Config, LoadError};
use half::bf16;
use ops::{DType, HostMat, OpError};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

/// Where weights come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A folder of safetensors files.
    Files {
        checkpoint: Checkpoint,
        /// Bytes of each weight of the table.
        located: BTreeMap<String, Located>,
    },
    /// The hash, with this seed.
    Synth {
        seed: u64,
        /// Threads that make values.
        threads: usize,
    },
}

/// A rank's part of one weight, on the host.
#[derive(Debug)]
pub(crate) struct HostPart<'a> {
    bytes: Cow<'a, [u8]>,
    dtype: DType,
    /// Rows and columns of the matrix that `bytes` holds.
    whole: [usize; 2],
    /// The part of it that is meant.
    slice: Slice,
}

impl Source {
    pub(crate) fn open(
        dir: &Path,
        config: &Config,
        specs: &[TensorSpec],
    ) -> Result<Self, LoadError> {
        let checkpoint = Checkpoint::open(dir)?;
        let located = locate(&checkpoint, config, specs)?;
        Ok(Self::Files { checkpoint, located })
    }

    /// Bytes that reading this slice of `spec` takes.
    pub(crate) fn bytes(&self, spec: &TensorSpec, slice: &Slice) -> u64 {
        let size = match self {
            Self::Files { located, .. } => located.get(&spec.name).map_or(0, |l| l.dtype.bytes()),
            Self::Synth { .. } => DType::BF16.bytes() as u64,
        };
        slice.elements() as u64 * size
    }

    /// The slice of one weight.
    pub(crate) fn part(&self, spec: &TensorSpec, slice: Slice) -> Result<HostPart<'_>, LoadError> {
        match self {
            Self::Synth { seed, threads } => Ok(synth_part(spec, &slice, *seed, *threads)),
            Self::Files { checkpoint, located } => {
                let missing = LoadError::Table { tensor: spec.name.clone(), what: "has no bytes" };
                let Some(place) = located.get(&spec.name) else { return Err(missing) };
                let Some(bytes) = checkpoint.bytes(&place.stored) else { return Err(missing) };
                let dtype = match place.dtype {
                    StoredDType::F32 => DType::F32,
                    StoredDType::BF16 => DType::BF16,
                    StoredDType::F16 => DType::F16,
                    _ => return Err(missing), // `locate` lets no other dtype pass.
                };
                let bytes = Cow::Borrowed(&bytes[place.bytes.clone()]);
                Ok(HostPart { bytes, dtype, whole: spec.matrix(), slice })
            }
        }
    }
}

impl HostPart<'_> {
    /// The rank's rows and columns, without padding.
    pub(crate) fn matrix(&self) -> Result<HostMat<'_>, OpError> {
        let [rows, cols] = self.whole;
        let whole = HostMat::new(&self.bytes, self.dtype, rows, cols)?;
        let Slice { rows, cols, .. } = &self.slice;
        Ok(whole.row_range(rows.start, rows.len()).column_range(cols.start, cols.len()))
    }

    /// Zero rows behind the rank's rows.
    pub(crate) fn padding(&self) -> usize {
        self.slice.padding
    }

    /// The part of a vector, as f32.
    pub(crate) fn vector(&self) -> Result<Vec<f32>, OpError> {
        let matrix = self.matrix()?;
        let mut values = vec![0.0; matrix.rows()];
        for (r, value) in values.iter_mut().enumerate() {
            matrix.read_row(r, std::slice::from_mut(value));
        }
        Ok(values)
    }
}

/// Makes the slice alone; bf16 holds the values exactly.
fn synth_part(spec: &TensorSpec, slice: &Slice, seed: u64, threads: usize) -> HostPart<'static> {
    let [_, inputs] = spec.matrix();
    let generator = Generator::new(&spec.name, seed, spec.values, inputs);
    let (rows, cols) = (slice.rows.len(), slice.cols.len());
    let row_bytes = cols * DType::BF16.bytes();
    let mut bytes = vec![0; rows * row_bytes];
    let rows_each = rows.div_ceil(threads.max(1)).max(1);
    thread::scope(|scope| {
        for (i, bytes) in bytes.chunks_mut((rows_each * row_bytes).max(1)).enumerate() {
            let generator = &generator;
            scope.spawn(move || {
                let first = slice.rows.start + i * rows_each;
                for (r, row) in bytes.chunks_mut(row_bytes.max(1)).enumerate() {
                    let start = ((first + r) * inputs + slice.cols.start) as u64;
                    for (j, out) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                        *out = bf16::from_f32(generator.value(start + j as u64)).to_le_bytes();
                    }
                }
            });
        }
    });
    let slice = Slice { rows: 0..rows, cols: 0..cols, padding: slice.padding };
    HostPart { bytes: Cow::Owned(bytes), dtype: DType::BF16, whole: [rows, cols], slice }
}
