//! Equal weight matrices that are used together: the experts of a layer.

use std::ptr::NonNull;
use std::sync::Arc;

use device::{Buffer, BufferDeallocator, DType, DeviceError};

use crate::{PackedMatrix, PackedScales};

const KERNEL: &str = "pack_group";
/// What a buffer begins on.
const ALIGNMENT: usize = 64;

/// `G` packed matrices `[N, K]`; made by [`KernelBackend::pack_group`](crate::KernelBackend::pack_group).
///
/// A device keeps them as its kernels like them: each by itself (the CPU's panels may not cross from one
/// to the next), or stacked, row behind row or in an order of its own, in one piece of memory.
#[derive(Debug)]
pub struct PackedGroup {
    parts: Vec<Arc<PackedMatrix>>,
    len: usize,
    tma_packed: bool,
}

impl PackedGroup {
    /// Matrices that were packed one by one; all of one shape.
    pub(crate) fn from_separate(parts: Vec<PackedMatrix>) -> Result<Self, DeviceError> {
        if let Some(first) = parts.first() {
            for part in &parts {
                check("outputs", part.n(), first.n())?;
                check("inputs", part.k(), first.k())?;
            }
        }
        let parts: Vec<Arc<PackedMatrix>> = parts.into_iter().map(Arc::new).collect();
        Ok(Self { len: parts.len(), parts, tma_packed: false })
    }

    /// `len` matrices that were packed as one of `len · N` rows.
    pub(crate) fn stacked(whole: PackedMatrix, len: usize) -> Result<Self, DeviceError> {
        check("rows of the stack", whole.n(), whole.n().next_multiple_of(len.max(1)))?;
        Ok(Self { parts: vec![Arc::new(whole)], len, tma_packed: false })
    }

    /// The same memory, whose rows the device has put in an order of its own.
    pub(crate) fn into_tma_packed(self) -> Self {
        Self { tma_packed: true, ..self }
    }

    /// Whether rows lie in the device's own order.
    pub(crate) fn is_tma_packed(&self) -> bool {
        self.tma_packed
    }

    /// Matrices.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Outputs of each.
    #[must_use]
    pub fn n(&self) -> usize {
        self.parts.iter().map(|part| part.n()).sum::<usize>() / self.len.max(1)
    }

    /// Inputs of each.
    #[must_use]
    pub fn k(&self) -> usize {
        self.parts.first().map_or(0, |part| part.k())
    }

    /// Element type: f32, bf16, f16, or fp8 with scales.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.parts.first().map_or(DType::F32, |part| part.dtype())
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes()).sum()
    }

    /// Matrix `i` of those that lie apart.
    ///
    /// # Panics
    /// If they are stacked or there are fewer.
    pub(crate) fn get(&self, i: usize) -> &PackedMatrix {
        assert!(self.parts.len() == self.len, "the matrices of this device are stacked");
        &self.parts[i]
    }

    /// Matrix `i` by itself, in the same memory. `None`: the device has put its rows in an order of its own, it begins where no
    /// matrix may, or there are fewer.
    #[must_use]
    pub fn matrix(&self, i: usize) -> Option<Arc<PackedMatrix>> {
        if self.tma_packed || i >= self.len {
            return None;
        }
        if self.parts.len() == self.len {
            return self.parts.get(i).cloned();
        }
        let (whole, n) = (self.parts.first()?, self.n());
        let PackedMatrix { dtype, k, .. } = **whole;
        let of = |buffer: &Buffer, bytes| part_of(whole, buffer, i * bytes, bytes);
        let buffer = of(&whole.buffer, n * k * dtype.bytes())?;
        let scales = whole.scales.as_ref().map(|scales| {
            let PackedScales { rows, stride, .. } = *scales;
            let buffer = of(&scales.buffer, n / rows * stride * size_of::<f32>())?;
            Some(PackedScales { buffer, rows, stride })
        });
        let scales = match scales {
            Some(scales) => Some(scales?),
            None => None,
        };
        Some(Arc::new(PackedMatrix { buffer, dtype, n, k, scales }))
    }

    /// Factors of the elements of a stack in fp8.
    pub(crate) fn scales(&self) -> Option<&PackedScales> {
        self.parts.first().and_then(|part| part.scales())
    }

    /// First byte of the stack.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.parts.first().map_or(std::ptr::null(), |part| part.as_ptr())
    }
}

/// Keeps a stack whose memory a matrix of it lies in.
struct StackKeepalive(#[expect(dead_code, reason = "held for its memory alone")] Arc<PackedMatrix>);

impl BufferDeallocator for StackKeepalive {
    /// The stack frees all of it.
    unsafe fn release(&self, _: NonNull<u8>, _: usize) {}
}

/// Bytes `[from, from + bytes)` of a buffer of `whole`, if they are there and begin where a buffer may.
fn part_of(
    whole: &Arc<PackedMatrix>,
    buffer: &Buffer,
    from: usize,
    bytes: usize,
) -> Option<Buffer> {
    if !from.is_multiple_of(ALIGNMENT) || from + bytes > buffer.bytes() {
        return None;
    }
    let first = NonNull::new(buffer.as_ptr().cast_mut())?;
    // SAFETY: inside the buffer, initialised and aligned as it is; weights are only read, and `StackKeepalive` keeps them alive.
    Some(unsafe {
        Buffer::from_raw(first.add(from), bytes, Arc::new(StackKeepalive(whole.clone())))
    })
}

fn check(what: &'static str, got: usize, expected: usize) -> Result<(), DeviceError> {
    if got == expected {
        return Ok(());
    }
    Err(DeviceError::Shape { kernel: KERNEL, what, got, expected })
}
