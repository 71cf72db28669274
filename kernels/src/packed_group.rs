//! `PackedMatrixGroup`: packed weight matrices of one shape that are used together, such as the experts of a layer.

use std::ptr::NonNull;
use std::sync::Arc;

use device::{Buffer, BufferDeallocator, DType, DeviceError};

use crate::{PackedMatrix, PackedScales};

const KERNEL: &str = "pack_group";
/// Alignment of device buffers, in bytes.
const ALIGNMENT: usize = 64;

/// Packed weight matrices of the same shape `[outputs, inputs]`, made by
/// [`KernelBackend::pack_group`](crate::KernelBackend::pack_group).
///
/// The memory layout depends on the device. CPUs store separate matrices, because a packed panel (32 outputs)
/// must not contain outputs of two matrices. GPUs store one stack of all rows, row-major or in tiles for TMA, as
/// elements of a type or in MXFP4.
#[derive(Debug)]
pub struct PackedMatrixGroup {
    parts: Vec<Arc<PackedMatrix>>,
    len: usize,
    layout: GroupLayout,
}

/// Memory layout of the rows of a group on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GroupLayout {
    RowMajor,
    /// Tiles for TMA (`csrc/moe/tma_layout.h`).
    Tma,
    /// Rows in MXFP4 (`csrc/dev/mxfp4.h`); the type of the matrices is that of the decoded elements.
    Mxfp4,
    /// Tiles in MXFP4 for TMA (`csrc/moe/tma_mxfp4.h`).
    TmaMxfp4,
}

impl PackedMatrixGroup {
    /// Makes a group of matrices that were packed one by one; returns an error if their shapes differ.
    pub(crate) fn from_separate(parts: Vec<PackedMatrix>) -> Result<Self, DeviceError> {
        if let Some(first) = parts.first() {
            for part in &parts {
                check("outputs", part.n(), first.n())?;
                check("inputs", part.k(), first.k())?;
            }
        }
        let parts: Vec<Arc<PackedMatrix>> = parts.into_iter().map(Arc::new).collect();
        Ok(Self { len: parts.len(), parts, layout: GroupLayout::RowMajor })
    }

    /// Makes a group of `len` matrices that were stacked by rows and packed as one matrix.
    pub(crate) fn stacked(stack: PackedMatrix, len: usize) -> Result<Self, DeviceError> {
        check("rows of the stack", stack.n(), stack.n().next_multiple_of(len.max(1)))?;
        Ok(Self { parts: vec![Arc::new(stack)], len, layout: GroupLayout::RowMajor })
    }

    /// Records that the rows of the group are stored in the TMA layout.
    pub(crate) fn into_tma_packed(self) -> Self {
        Self { layout: GroupLayout::Tma, ..self }
    }

    /// Records that the rows of the group are stored in MXFP4.
    pub(crate) fn into_mxfp4(self) -> Self {
        Self { layout: GroupLayout::Mxfp4, ..self }
    }

    /// Makes a group of `len` matrices in MXFP4 whose tiles for TMA are in the memory of `stack`.
    pub(crate) fn tma_mxfp4(stack: PackedMatrix, len: usize) -> Result<Self, DeviceError> {
        Ok(Self { layout: GroupLayout::TmaMxfp4, ..Self::stacked(stack, len)? })
    }

    /// Whether rows are stored in a TMA layout.
    pub(crate) fn is_tma_packed(&self) -> bool {
        matches!(self.layout, GroupLayout::Tma | GroupLayout::TmaMxfp4)
    }

    /// Whether rows are stored in MXFP4.
    #[must_use]
    pub fn is_mxfp4(&self) -> bool {
        matches!(self.layout, GroupLayout::Mxfp4 | GroupLayout::TmaMxfp4)
    }

    /// Number of matrices.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the group has no matrix.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of outputs (rows) of each matrix.
    #[must_use]
    pub fn n(&self) -> usize {
        self.parts.iter().map(|part| part.n()).sum::<usize>() / self.len.max(1)
    }

    /// Number of inputs (columns) of each matrix.
    #[must_use]
    pub fn k(&self) -> usize {
        self.parts.first().map_or(0, |part| part.k())
    }

    /// Element type: f32, bf16, f16, or fp8 with scales; for MXFP4 the 16-bit type to which kernels decode elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.parts.first().map_or(DType::F32, |part| part.dtype())
    }

    /// Size of all matrices in bytes, scales included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes()).sum()
    }

    /// Returns matrix `i` of a group of separate matrices.
    ///
    /// # Panics
    /// If the matrices are stacked or `i >= len`.
    pub(crate) fn get(&self, i: usize) -> &PackedMatrix {
        assert!(self.parts.len() == self.len, "the matrices of the group are stacked");
        &self.parts[i]
    }

    /// Returns matrix `i` as a separate matrix that shares the memory of the group. `None` if the rows are
    /// not row-major, the matrix does not start at a multiple of the buffer alignment, or `i >= len`.
    #[must_use]
    pub fn matrix(&self, i: usize) -> Option<Arc<PackedMatrix>> {
        if self.layout != GroupLayout::RowMajor || i >= self.len {
            return None;
        }
        if self.parts.len() == self.len {
            return self.parts.get(i).cloned();
        }
        let (stack, n) = (self.parts.first()?, self.n());
        let PackedMatrix { dtype, k, .. } = **stack;
        let slice = |buffer: &Buffer, bytes| slice_buffer(stack, buffer, i * bytes, bytes);
        let buffer = slice(&stack.buffer, n * k * dtype.bytes())?;
        let scales = stack.scales.as_ref().map(|scales| {
            let PackedScales { rows, stride, activation_scaling, .. } = *scales;
            let buffer = slice(&scales.buffer, n / rows * stride * size_of::<f32>())?;
            Some(PackedScales { buffer, rows, stride, activation_scaling, blocks: None })
        });
        let scales = match scales {
            Some(scales) => Some(scales?),
            None => None,
        };
        Some(Arc::new(PackedMatrix { buffer, dtype, n, k, scales }))
    }

    /// Dequantisation scales of a stack of fp8 matrices; `None` for other types.
    pub(crate) fn scales(&self) -> Option<&PackedScales> {
        self.parts.first().and_then(|part| part.scales())
    }

    /// Address of the first byte of the stack.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.parts.first().map_or(std::ptr::null(), |part| part.as_ptr())
    }
}

/// Deallocator for the buffer of a matrix that shares the memory of a stack of matrices. It holds a reference
/// to the stack, so that the memory stays allocated.
struct StackedMatrixDeallocator(
    #[expect(dead_code, reason = "keeps the memory allocated")] Arc<PackedMatrix>,
);

impl BufferDeallocator for StackedMatrixDeallocator {
    /// Does nothing: the memory is freed together with the stack.
    unsafe fn release(&self, _: NonNull<u8>, _: usize) {}
}

/// Returns bytes `[from, from + bytes)` of a buffer of `stack`; `None` if they are out of range or
/// misaligned.
fn slice_buffer(
    stack: &Arc<PackedMatrix>,
    buffer: &Buffer,
    from: usize,
    bytes: usize,
) -> Option<Buffer> {
    if !from.is_multiple_of(ALIGNMENT) || from + bytes > buffer.bytes() {
        return None;
    }
    let first = NonNull::new(buffer.as_ptr().cast_mut())?;
    // SAFETY: the range is inside the buffer, initialised, and aligned as checked; weights are only read, and
    // `StackedMatrixDeallocator` keeps the memory allocated.
    Some(unsafe {
        Buffer::from_raw(first.add(from), bytes, Arc::new(StackedMatrixDeallocator(stack.clone())))
    })
}

fn check(what: &'static str, got: usize, expected: usize) -> Result<(), DeviceError> {
    if got == expected {
        return Ok(());
    }
    Err(DeviceError::Shape { kernel: KERNEL, what, got, expected })
}
