//! Device memory with a single owner; the memory is freed when the owner is dropped.
//!
//! A buffer is zero-initialised when it is allocated, so that every read returns initialised bytes. Reads use
//! shared references and writes use unique references, so that the borrow checker prevents data races between
//! CPU kernels.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::{DType, DeviceError, MatMut, MatRef};

/// Frees the memory of dropped buffers. CPU memory, GPU memory and slabs of weight memory (allocations that
/// several weights share) have separate implementations.
pub trait BufferDeallocator: Send + Sync {
    /// Frees the range `[ptr, ptr + bytes)` of a dropped buffer.
    ///
    /// # Safety
    /// The range was allocated by this allocator with exactly this size, and it is not used again.
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize);
}

/// Contiguous range of device memory, aligned to 64 bytes. The memory is freed when the buffer is dropped.
pub struct Buffer {
    ptr: NonNull<u8>,
    bytes: usize,
    deallocator: Arc<dyn BufferDeallocator>,
}

// SAFETY: the buffer owns its range; `&Buffer` only reads and `&mut Buffer` excludes readers.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Wraps an allocation that is not used elsewhere.
    ///
    /// # Safety
    /// `[ptr, ptr + bytes)` is initialised, 64-byte aligned and not used elsewhere, and `deallocator` frees
    /// it.
    pub unsafe fn from_raw(
        ptr: NonNull<u8>,
        bytes: usize,
        deallocator: Arc<dyn BufferDeallocator>,
    ) -> Self {
        Self { ptr, bytes, deallocator }
    }

    /// Wraps memory that another owner allocated and frees, such as the KV cache of a foreign host.
    ///
    /// # Safety
    /// As for [`Buffer::from_raw`] until the buffer is dropped, but the owner of the memory frees it.
    pub unsafe fn foreign(ptr: NonNull<u8>, bytes: usize) -> Self {
        // SAFETY: the caller guarantees the range.
        unsafe { Self::from_raw(ptr, bytes, Arc::new(BorrowedMemory)) }
    }

    /// Size of the buffer in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the first byte of the buffer in device memory.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// Returns the address of the first byte of the buffer in device memory, for writing.
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

    /// Views the first `rows * cols` elements as a matrix `[rows, cols]`.
    pub fn mat(&self, dtype: DType, rows: usize, cols: usize) -> Result<MatRef<'_>, DeviceError> {
        self.check(dtype, rows, cols)?;
        // SAFETY: `check` compared the shape with the size of the buffer; the borrow keeps the memory alive.
        Ok(unsafe { MatRef::from_raw(self.as_ptr(), dtype, rows, cols, cols) })
    }

    /// Views `rows` rows of `cols` elements as a matrix; consecutive rows start `stride` elements apart.
    ///
    /// # Panics
    /// If the rows extend beyond the buffer.
    pub fn mat_strided(&self, dtype: DType, rows: usize, cols: usize, stride: usize) -> MatRef<'_> {
        assert!(cols <= stride && rows * stride * dtype.bytes() <= self.bytes);
        // SAFETY: the assertion compared the shape with the size of the buffer; the borrow keeps the memory
        // alive.
        unsafe { MatRef::from_raw(self.as_ptr(), dtype, rows, cols, stride) }
    }

    /// Views the first `rows * cols` elements as a mutable matrix `[rows, cols]`. The row capacity of the
    /// matrix includes the rest of the buffer, so that kernels may also overwrite elements after the last
    /// row.
    pub fn mat_mut(
        &mut self,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<MatMut<'_>, DeviceError> {
        self.check(dtype, rows, cols)?;
        let row_capacity = self.bytes / (cols * dtype.bytes()).max(1);
        // SAFETY: `check` compared the shape with the size of the buffer; the unique borrow excludes other
        // views.
        Ok(unsafe {
            MatMut::from_raw(self.as_mut_ptr(), dtype, rows, cols, cols)
                .with_row_capacity(row_capacity)
        })
    }
}

/// Part of a buffer, which the part borrows.
#[derive(Debug)]
pub struct BufferPart<'a> {
    part: Buffer,
    borrowed: PhantomData<&'a Buffer>,
}

/// Part of a buffer, which the part borrows uniquely.
#[derive(Debug)]
pub struct BufferPartMut<'a> {
    part: Buffer,
    borrowed: PhantomData<&'a mut Buffer>,
}

/// Deallocator of buffers that do not own their memory.
struct BorrowedMemory;

impl BufferDeallocator for BorrowedMemory {
    unsafe fn release(&self, _ptr: NonNull<u8>, _bytes: usize) {}
}

impl Buffer {
    /// Alignment of buffers and of their parts, in bytes.
    pub const ALIGNMENT: usize = 64;

    /// Returns the bytes `range` of the buffer. The range must start at a multiple of 64 bytes.
    pub fn part(&self, range: Range<usize>) -> Result<BufferPart<'_>, DeviceError> {
        Ok(BufferPart { part: self.borrowed(range)?, borrowed: PhantomData })
    }

    /// Returns the bytes `range` of the buffer for writing. The range must start at a multiple of 64 bytes.
    pub fn part_mut(&mut self, range: Range<usize>) -> Result<BufferPartMut<'_>, DeviceError> {
        Ok(BufferPartMut { part: self.borrowed(range)?, borrowed: PhantomData })
    }

    /// Returns a buffer of the bytes `range`, which does not own them.
    fn borrowed(&self, range: Range<usize>) -> Result<Self, DeviceError> {
        let Range { start, end } = range;
        let error =
            |what, got, expected| DeviceError::Shape { kernel: "part", what, got, expected };
        if end > self.bytes || start > end {
            return Err(error("bytes", end.max(start), self.bytes));
        }
        if !start.is_multiple_of(Self::ALIGNMENT) {
            return Err(error("first byte", start, start.next_multiple_of(Self::ALIGNMENT)));
        }
        // SAFETY: the range is inside the buffer, so the pointer is not null; callers return the buffer with a
        // borrow of `self`, and its deallocator frees nothing.
        Ok(unsafe {
            let ptr = self.ptr.add(start);
            Self::from_raw(ptr, end - start, Arc::new(BorrowedMemory))
        })
    }
}

impl Deref for BufferPart<'_> {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.part
    }
}

impl Deref for BufferPartMut<'_> {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.part
    }
}

impl DerefMut for BufferPartMut<'_> {
    fn deref_mut(&mut self) -> &mut Buffer {
        &mut self.part
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the caller of `from_raw` guaranteed that `deallocator` frees exactly this range.
        unsafe { self.deallocator.release(self.ptr, self.bytes) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
