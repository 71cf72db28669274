//! Memory of a host.

use hadron_plugin::ForeignArray;

/// `hadron_dtype` of 32-bit floats and of 32-bit and 64-bit integers.
pub(crate) const F32: u32 = 0;
pub(crate) const I32: u32 = 4;
pub(crate) const I64: u32 = 5;

/// Bytes with the alignment of a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "accessed by address")] [u8; 64]);

/// Memory of the host, aligned to 64 bytes. The emulated GPU uses memory of the host processor too.
pub(crate) struct HostMemory {
    lines: Vec<CacheLine>,
    bytes: usize,
}

impl HostMemory {
    pub(crate) fn new(bytes: usize, fill: u8) -> Self {
        let line = CacheLine([fill; 64]);
        Self { lines: vec![line; bytes.div_ceil(64).max(1) + 1], bytes }
    }

    pub(crate) fn of<T: Copy>(values: &[T]) -> Self {
        let mut memory = Self::new(size_of_val(values), 0);
        memory.write(values);
        memory
    }

    /// Replaces the first bytes by `values`.
    pub(crate) fn write<T: Copy>(&mut self, values: &[T]) {
        assert!(size_of_val(values) <= self.bytes);
        let to = self.lines.as_mut_ptr().cast::<T>();
        // SAFETY: the values fit, and lines are aligned for all integers and floats.
        unsafe { to.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }

    pub(crate) fn read<T: Copy>(&self, len: usize) -> Vec<T> {
        assert!(len * size_of::<T>() <= self.bytes);
        // SAFETY: the elements are inside of the memory, and any bits are integers and floats.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast::<T>(), len).to_vec() }
    }

    pub(crate) fn array(&self, dtype: u32) -> ForeignArray {
        let address = self.lines.as_ptr() as u64;
        ForeignArray { address, bytes: self.bytes as u64, dtype, reserved: 0 }
    }
}
