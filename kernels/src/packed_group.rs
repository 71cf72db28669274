//! Equal weight matrices that are used together: the experts of a layer.

use crate::{DType, DeviceError, Packed, Scales};

const KERNEL: &str = "pack_group";

/// `G` packed matrices `[N, K]`; made by [`Kernels::pack_group`](crate::Kernels::pack_group).
///
/// A device keeps them as its kernels like them: each by itself (the CPU's panels may not cross from one
/// to the next), or stacked, row behind row or in an order of its own, in one piece of memory.
#[derive(Debug)]
pub struct PackedGroup {
    parts: Vec<Packed>,
    len: usize,
    lines: bool,
}

impl PackedGroup {
    /// Matrices that were packed one by one; all of one shape.
    pub(crate) fn apart(parts: Vec<Packed>) -> Result<Self, DeviceError> {
        if let Some(first) = parts.first() {
            for part in &parts {
                check("outputs", part.n(), first.n())?;
                check("inputs", part.k(), first.k())?;
            }
        }
        Ok(Self { len: parts.len(), parts, lines: false })
    }

    /// `len` matrices that were packed as one of `len · N` rows.
    pub(crate) fn stacked(whole: Packed, len: usize) -> Result<Self, DeviceError> {
        check("rows of the stack", whole.n(), whole.n().next_multiple_of(len.max(1)))?;
        Ok(Self { parts: vec![whole], len, lines: false })
    }

    /// The same memory, whose rows the device has put in an order of its own.
    pub(crate) fn lined(self) -> Self {
        Self { lines: true, ..self }
    }

    /// Whether rows lie in the device's own order.
    pub(crate) fn is_lined(&self) -> bool {
        self.lines
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
        self.parts.iter().map(Packed::n).sum::<usize>() / self.len.max(1)
    }

    /// Inputs of each.
    #[must_use]
    pub fn k(&self) -> usize {
        self.parts.first().map_or(0, Packed::k)
    }

    /// Element type: f32, bf16, f16, or fp8 with scales.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.parts.first().map_or(DType::F32, Packed::dtype)
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Packed::bytes).sum()
    }

    /// Matrix `i` of those that lie apart.
    ///
    /// # Panics
    /// If they are stacked or there are fewer.
    pub(crate) fn get(&self, i: usize) -> &Packed {
        assert!(self.parts.len() == self.len, "the matrices of this device are stacked");
        &self.parts[i]
    }

    /// Factors of the elements of a stack in fp8.
    pub(crate) fn scales(&self) -> Option<&Scales> {
        self.parts.first().and_then(Packed::scales)
    }

    /// First byte of the stack.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.parts.first().map_or(std::ptr::null(), Packed::as_ptr)
    }
}

fn check(what: &'static str, got: usize, expected: usize) -> Result<(), DeviceError> {
    if got == expected {
        return Ok(());
    }
    Err(DeviceError::Shape { kernel: KERNEL, what, got, expected })
}
