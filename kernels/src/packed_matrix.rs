//! Weights in the memory layout that kernels read.
//!
//! `W [N, K]` is split into panels of 32 output columns (rows of `W`), each contiguous:
//! f32: `[panel][k][32]`; bf16: `[panel][k / 2][32][k % 2]`, so that one 64-byte cache line has two
//! consecutive inputs of 16 outputs: the operand of a paired bf16 dot product, and equally two f32 vectors
//! after a shift and a mask; f16: as f32, widened when read. Outputs after `N` in the last panel are zero.
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
    /// Scales of an fp8 matrix.
    pub(crate) scales: Option<PackedScales>,
}

/// Dequantisation scales of an fp8 matrix, f32 on the device.
#[derive(Debug)]
pub struct PackedScales {
    pub(crate) buffer: Buffer,
    /// Number of outputs per scale: 1 (the scale covers all inputs of the output), or several (128 inputs per
    /// scale).
    pub(crate) rows: usize,
    /// Number of scales per row of scales.
    pub(crate) stride: usize,
}

impl PackedMatrix {
    /// Number of outputs: rows of the stored matrix.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of inputs: columns of the stored matrix.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Element type: f32, bf16, f16, or fp8 with scales.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Size in bytes, scales included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffer.bytes() + self.scales.as_ref().map_or(0, |s| s.buffer.bytes())
    }

    /// Scales of an fp8 matrix.
    #[must_use]
    pub fn scales(&self) -> Option<&PackedScales> {
        self.scales.as_ref()
    }

    /// Elements, in the layout of the device that the matrix was packed for.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Address of the first byte, on the device that the matrix was packed for.
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
        // SAFETY: `index < panels`, and the buffer has `panels` panels.
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
