//! Weights in the order in which kernels read them.
//!
//! `W [N, K]` is cut into panels of 32 output columns (rows of `W`), each contiguous:
//! f32: `[panel][k][32]`; bf16: `[panel][k / 2][32][k % 2]`, so that one 64-byte line holds two
//! consecutive inputs of 16 outputs: the operand of a paired bf16 dot product, and equally two
//! f32 vectors after a shift and a mask. Outputs beyond `N` in the last panel are zero.
//! One copy serves every instruction set, the matrix product and the embedding lookup.

use crate::{Buffer, DType, DeviceError};

/// Output columns of one panel.
pub const PANEL_COLUMNS: usize = 32;

/// A packed weight matrix `[N, K]`; made by [`Kernels::pack`](crate::Kernels::pack).
#[derive(Debug)]
pub struct Packed {
    pub(crate) buffer: Buffer,
    pub(crate) dtype: DType,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl Packed {
    /// Outputs: rows of the stored matrix.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs: columns of the stored matrix.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Element type, f32 or bf16.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// The elements, in the order of the device the matrix was packed on.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// First byte; on the device the matrix was packed on.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.buffer.as_ptr()
    }

    pub(crate) fn panels(&self) -> usize {
        self.n.div_ceil(PANEL_COLUMNS)
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        PANEL_COLUMNS * self.k * self.dtype.bytes()
    }

    pub(crate) fn panel(&self, index: usize) -> *const u8 {
        debug_assert!(index < self.panels());
        // SAFETY: inside the buffer, which holds `panels` panels.
        unsafe { self.buffer.as_ptr().add(index * self.panel_bytes()) }
    }

    /// Element index of output `n`, input `k`.
    pub(crate) fn index(&self, n: usize, k: usize) -> usize {
        let (panel, column) = (n / PANEL_COLUMNS * PANEL_COLUMNS * self.k, n % PANEL_COLUMNS);
        match self.dtype {
            DType::BF16 => panel + ((k / 2) * PANEL_COLUMNS + column) * 2 + k % 2,
            _ => panel + k * PANEL_COLUMNS + column,
        }
    }
}

/// A matrix on the host as a file stores it: little endian, any alignment, rows `stride` apart.
#[derive(Debug, Clone, Copy)]
pub struct HostMat<'a> {
    bytes: &'a [u8],
    dtype: DType,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> HostMat<'a> {
    /// Views `rows * cols` contiguous elements.
    pub fn new(
        bytes: &'a [u8],
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<Self, DeviceError> {
        let expected = rows.saturating_mul(cols).saturating_mul(dtype.bytes());
        if bytes.len() != expected {
            let got = bytes.len();
            return Err(DeviceError::Shape { kernel: "host matrix", what: "bytes", got, expected });
        }
        Ok(Self { bytes, dtype, rows, cols, stride: cols })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows `[from, from + rows)`.
    ///
    /// # Panics
    /// If they reach beyond the matrix.
    #[must_use]
    pub fn row_range(&self, from: usize, rows: usize) -> Self {
        assert!(from + rows <= self.rows, "rows {from}+{rows} of {}", self.rows);
        let bytes = &self.bytes[from * self.stride * self.dtype.bytes()..];
        Self { bytes, rows, ..*self }
    }

    /// Columns `[from, from + cols)` of every row.
    ///
    /// # Panics
    /// If they reach beyond the matrix.
    #[must_use]
    pub fn column_range(&self, from: usize, cols: usize) -> Self {
        assert!(from + cols <= self.cols, "columns {from}+{cols} of {}", self.cols);
        let bytes = &self.bytes[from * self.dtype.bytes()..];
        Self { bytes, cols, ..*self }
    }

    /// All bytes, if the rows follow each other without gaps.
    pub(crate) fn contiguous_bytes(&self) -> Option<&'a [u8]> {
        let bytes = self.rows * self.cols * self.dtype.bytes();
        (self.stride == self.cols || self.rows <= 1).then(|| &self.bytes[..bytes])
    }

    /// Bytes of row `r`.
    ///
    /// # Panics
    /// If the row is outside.
    #[must_use]
    pub fn row_bytes(&self, r: usize) -> &'a [u8] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        let size = self.dtype.bytes();
        &self.bytes[r * self.stride * size..][..self.cols * size]
    }

    /// Row `r` converted to f32.
    ///
    /// # Panics
    /// If the row is outside or `out` is not `cols` long.
    pub fn read_row(&self, r: usize, out: &mut [f32]) {
        let bytes = self.row_bytes(r);
        assert_eq!(out.len(), self.cols);
        match self.dtype {
            DType::F32 => read(bytes, out, f32::from_le_bytes),
            DType::BF16 => read(bytes, out, |b| half::bf16::from_le_bytes(b).to_f32()),
            DType::F16 => read(bytes, out, |b| half::f16::from_le_bytes(b).to_f32()),
            DType::I32 => read(bytes, out, |b| i32::from_le_bytes(b) as f32),
            DType::I64 => read(bytes, out, |b| i64::from_le_bytes(b) as f32),
        }
    }
}

fn read<const B: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; B]) -> f32) {
    for (x, raw) in out.iter_mut().zip(bytes.as_chunks::<B>().0) {
        *x = value(*raw);
    }
}
