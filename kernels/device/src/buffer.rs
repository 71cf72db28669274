//! Device memory with one owner.
//!
//! Invariant: a buffer is initialised (zero) when it is allocated, so any bits read from it are values.
//! Shared references read, unique references write: the borrow checker orders kernels on the CPU.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::{DType, DeviceError, MatMut, MatRef};

/// Takes back the memory of dropped buffers.
pub trait BufferDeallocator: Send + Sync {
    /// Frees `[ptr, ptr + bytes)`.
    ///
    /// # Safety
    /// The range was handed out by this allocator with exactly this size and is not used again.
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize);
}

/// A contiguous range of device memory, 64-byte aligned.
pub struct Buffer {
    ptr: NonNull<u8>,
    bytes: usize,
    home: Arc<dyn BufferDeallocator>,
}

// SAFETY: the buffer owns its range; `&Buffer` only reads and `&mut Buffer` excludes readers.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Wraps a fresh allocation.
    ///
    /// # Safety
    /// `[ptr, ptr + bytes)` is initialised, 64-byte aligned, used by nobody else, and `home` frees it.
    pub unsafe fn from_raw(
        ptr: NonNull<u8>,
        bytes: usize,
        home: Arc<dyn BufferDeallocator>,
    ) -> Self {
        Self { ptr, bytes, home }
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// Address of the first byte, for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    fn check(&self, dtype: DType, rows: usize, cols: usize) -> Result<(), DeviceError> {
        let bytes = rows.checked_mul(cols).and_then(|n| n.checked_mul(dtype.bytes()));
        match bytes {
            Some(bytes) if bytes <= self.bytes => Ok(()),
            _ => Err(DeviceError::Shape {
                kernel: "view",
                what: "elements",
                got: rows.saturating_mul(cols),
                expected: self.bytes / dtype.bytes(),
            }),
        }
    }

    /// The first `rows * cols` elements as a matrix.
    pub fn mat(&self, dtype: DType, rows: usize, cols: usize) -> Result<MatRef<'_>, DeviceError> {
        self.check(dtype, rows, cols)?;
        // SAFETY: checked against the size just now; the borrow keeps the memory alive.
        Ok(unsafe { MatRef::from_raw(self.as_ptr(), dtype, rows, cols, cols) })
    }

    /// Rows of `cols` elements, `stride` apart.
    ///
    /// # Panics
    /// If they reach beyond the buffer.
    pub fn mat_strided(&self, dtype: DType, rows: usize, cols: usize, stride: usize) -> MatRef<'_> {
        assert!(cols <= stride && rows * stride * dtype.bytes() <= self.bytes);
        // SAFETY: checked just now; the borrow keeps the memory alive.
        unsafe { MatRef::from_raw(self.as_ptr(), dtype, rows, cols, stride) }
    }

    /// The first `rows * cols` elements as a matrix to write. What lies behind them may change as well.
    pub fn mat_mut(
        &mut self,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<MatMut<'_>, DeviceError> {
        self.check(dtype, rows, cols)?;
        let room = self.bytes / (cols * dtype.bytes()).max(1);
        // SAFETY: checked against the size just now; the unique borrow excludes other views.
        Ok(unsafe {
            MatMut::from_raw(self.as_mut_ptr(), dtype, rows, cols, cols).with_row_capacity(room)
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `from_raw` was promised that `home` frees exactly this range.
        unsafe { self.home.release(self.ptr, self.bytes) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
