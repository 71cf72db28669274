//! Embedding lookup from a row-major table or from a packed matrix.
//!
//! In a packed matrix the elements of a row are not contiguous: each 4 bytes of a row (two bf16 or one f32)
//! are 128 bytes apart, so a lookup reads one cache line per 4 bytes. The lookup takes a few microseconds per
//! token, while a forward pass takes milliseconds; in return, a tied LM head of 150,000 rows is stored once
//! instead of twice.

use device::{DType, DeviceError, FloatElement, MatMut, MatRef, check_dtype, check_size};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::shared_rows::SharedRows;
use crate::cpu::CpuBackend;
use crate::{CpuKernel, PackedEmbedding, TokenEmbedding};

const KERNEL: &str = "embed";

impl CpuBackend {
    fn look_up<T: FloatElement>(
        &self,
        y: &mut MatMut<'_>,
        lookup: &EmbeddingRowLookup<'_>,
        copy: impl Fn(&mut [T], usize) + Sync,
    ) -> Result<(), DeviceError> {
        check_dtype(KERNEL, "ids", lookup.ids.dtype(), DType::I32)?;
        check_size(KERNEL, "ids", lookup.ids.cols(), y.rows())?;
        let cols = y.cols();
        let out = SharedRows::<T>::new(y);
        let ids = lookup.ids.row::<i32>(0);
        self.threads().split(ids.len(), 1, min_rows(cols), &|range| {
            for t in range {
                // SAFETY: each row belongs to one thread.
                let row = unsafe { out.row(t) };
                match lookup.row(ids[t]) {
                    Some(n) => copy(row, n),
                    None => row.fill(T::store(0.0)),
                }
            }
        });
        Ok(())
    }
}

impl CpuKernel for PackedEmbedding<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut y, ids, table, first } = self;
        check_size(KERNEL, "columns", y.cols(), table.k())?;
        check_dtype(KERNEL, "table", table.dtype(), y.dtype())?;
        let elements = table.bytes() / table.dtype().bytes();
        let all = table.buffer.mat(table.dtype(), 1, elements)?;
        let lookup = EmbeddingRowLookup { ids, first, rows: table.n() };
        for_float!(KERNEL, y.dtype(), T => cpu.look_up::<T>(&mut y, &lookup, |row, n| {
            let weights = all.row::<T>(0);
            for (k, x) in row.iter_mut().enumerate() {
                *x = weights[table.index(n, k)];
            }
        })?);
        Ok(())
    }
}

impl CpuKernel for TokenEmbedding<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut y, ids, table, first } = self;
        check_size(KERNEL, "columns", y.cols(), table.cols())?;
        check_dtype(KERNEL, "table", table.dtype(), y.dtype())?;
        let lookup = EmbeddingRowLookup { ids, first, rows: table.rows() };
        for_float!(KERNEL, y.dtype(), T => cpu.look_up::<T>(&mut y, &lookup, |row, n| {
            row.copy_from_slice(table.row(n));
        })?);
        Ok(())
    }
}

/// Maps token ids to rows of the embedding table of this rank, which has `rows` rows, for token ids from
/// `first` on.
struct EmbeddingRowLookup<'a> {
    ids: MatRef<'a>,
    first: usize,
    rows: usize,
}

impl EmbeddingRowLookup<'_> {
    /// Returns the row of the embedding table for token id `id`; `None` if this rank does not have the row.
    fn row(&self, id: i32) -> Option<usize> {
        let row = usize::try_from(id).ok()?.checked_sub(self.first)?;
        (row < self.rows).then_some(row)
    }
}
