//! Weight matrices in the memory layout that kernels read.
//!
//! On CPUs a matrix of `N` outputs (rows) and `K` inputs (columns) is split into panels of 32 outputs, each
//! contiguous in memory. A panel is `[k][32]` in f32 and f16, and `[k / 2][32][k % 2]` in bf16: a 64-byte
//! cache line then has two consecutive inputs of 16 outputs, which is the operand of a paired bf16 dot
//! product, or two f32 vectors after a shift and a mask. f16 is converted to f32 when it is read. Outputs
//! after `N` in the last panel are zero. All instruction sets, the matrix product and the embedding lookup
//! read this layout.

use crate::ActivationScaling;
use device::{Buffer, DType};

/// Number of outputs (rows of the weight matrix) in one panel of the CPU layout.
pub const PANEL_COLUMNS: usize = 32;

/// A packed weight matrix `[outputs, inputs]`, made by [`KernelBackend::pack`](crate::KernelBackend::pack).
#[derive(Debug)]
pub struct PackedMatrix {
    pub(crate) buffer: Buffer,
    pub(crate) dtype: DType,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Dequantisation scales; `None` if the matrix is not fp8.
    pub(crate) scales: Option<PackedScales>,
}

/// Dequantisation scales of an fp8 matrix, f32 on the device.
#[derive(Debug)]
pub struct PackedScales {
    pub(crate) buffer: Buffer,
    /// Number of outputs per scale. If 1, each scale covers all inputs of one output; if more, each scale
    /// covers 128 inputs.
    pub(crate) rows: usize,
    /// Row stride of the scale matrix in `buffer`, in scales; padding included.
    pub(crate) stride: usize,
    /// How the activations that are multiplied by this matrix are scaled when they are quantised to fp8.
    pub(crate) activation_scaling: ActivationScaling,
    /// The same scales as blocks of 128 × 128, with rows padded to multiples of 4 scales. `None` unless
    /// activation scales are static, every stacked matrix has one scale, and BLASLt supports blocks: with a medium
    /// number of rows its GEMM with block scales is faster than the one with a scale per output.
    pub(crate) blocks: Option<Buffer>,
}

impl PackedScales {
    /// Size in bytes.
    fn bytes(&self) -> usize {
        self.buffer.bytes() + self.blocks.as_ref().map_or(0, Buffer::bytes)
    }
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
        self.buffer.bytes() + self.scales.as_ref().map_or(0, PackedScales::bytes)
    }

    /// Dequantisation scales of an fp8 matrix; `None` for other types.
    #[must_use]
    pub fn scales(&self) -> Option<&PackedScales> {
        self.scales.as_ref()
    }

    /// Memory of the elements, in the layout of the device that the matrix was packed for.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Address of the first element, in the memory of the device that the matrix was packed for.
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

    /// Element index in `buffer` of the weight of output `n` and input `k`, in the CPU layout.
    pub(crate) fn index(&self, n: usize, k: usize) -> usize {
        let (panel, column) = (n / PANEL_COLUMNS * PANEL_COLUMNS * self.k, n % PANEL_COLUMNS);
        match self.dtype {
            DType::BF16 => panel + ((k / 2) * PANEL_COLUMNS + column) * 2 + k % 2,
            _ => panel + k * PANEL_COLUMNS + column,
        }
    }
}
