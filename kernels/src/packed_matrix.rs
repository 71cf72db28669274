//! Weights in the order in which kernels read them.
//!
//! `W [N, K]` is cut into panels of 32 output columns (rows of `W`), each contiguous:
//! f32: `[panel][k][32]`; bf16: `[panel][k / 2][32][k % 2]`, so that one 64-byte line holds two
//! consecutive inputs of 16 outputs: the operand of a paired bf16 dot product, and equally two
//! f32 vectors after a shift and a mask; f16: as f32, widened as it is read. Outputs beyond `N` in the last panel are zero.
//! One copy serves every instruction set, the matrix product and the embedding lookup.

use device::{Buffer, DType};

/// Output columns of one panel.
pub const PANEL_COLUMNS: usize = 32;

/// A packed weight matrix `[N, K]`; made by [`KernelBackend::pack`](crate::KernelBackend::pack).
#[derive(Debug)]
pub struct PackedMatrix {
    pub(crate) buffer: Buffer,
    pub(crate) dtype: DType,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Of fp8 elements.
    pub(crate) scales: Option<PackedScales>,
}

/// Factors of a matrix in fp8, f32 on the device.
#[derive(Debug)]
pub struct PackedScales {
    pub(crate) buffer: Buffer,
    /// Outputs that share a factor: one, which then has all inputs, or several, with 128 inputs each.
    pub(crate) rows: usize,
    /// Factors between rows of them.
    pub(crate) stride: usize,
}

impl PackedMatrix {
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

    /// Element type: f32, bf16, f16, or fp8 with scales.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffer.bytes() + self.scales.as_ref().map_or(0, |s| s.buffer.bytes())
    }

    /// Factors of the elements, of a matrix in fp8.
    #[must_use]
    pub fn scales(&self) -> Option<&PackedScales> {
        self.scales.as_ref()
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
