//! Pointers through which the threads of a parallel region write to disjoint parts of one matrix.

use device::{DeviceElement, MatMut};

/// A pointer that may be sent to other threads. At each use a `SAFETY` comment states why no other thread
/// accesses the same range.
#[derive(Debug, Clone, Copy)]
pub(super) struct SendPtr<T>(pub(super) *mut T);

// SAFETY: a plain pointer; each dereference has its own safety argument.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: a plain pointer; each dereference has its own safety argument.
unsafe impl<T> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    pub(super) fn get(self) -> *mut T {
        self.0
    }
}

/// Rows of a matrix to which several threads write.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedRows<T> {
    start: SendPtr<T>,
    height: usize,
    cols: usize,
    stride: usize,
}

impl<T: DeviceElement> SharedRows<T> {
    /// Shares the rows of `mat`.
    ///
    /// # Panics
    /// If `T` is not the element type.
    pub(super) fn new(mat: &mut MatMut<'_>) -> Self {
        assert_eq!(T::DTYPE, mat.dtype());
        let (height, cols, stride) = (mat.rows(), mat.cols(), mat.stride());
        Self { start: SendPtr(mat.as_mut_ptr().cast()), height, cols, stride }
    }

    /// Returns columns `[from, from + len)` of row `r`.
    ///
    /// # Safety
    /// The matrix is still mutably borrowed, and no other thread accesses these elements meanwhile.
    pub(super) unsafe fn part<'a>(&self, r: usize, from: usize, len: usize) -> &'a mut [T] {
        assert!(r < self.height && from + len <= self.cols);
        // SAFETY: the range is inside the matrix as asserted, and exclusive by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.get().add(r * self.stride + from), len) }
    }

    /// Returns row `r`.
    ///
    /// # Safety
    /// See [`SharedRows::part`].
    pub(super) unsafe fn row<'a>(&self, r: usize) -> &'a mut [T] {
        // SAFETY: the caller guarantees what `part` requires.
        unsafe { self.part(r, 0, self.cols) }
    }
}
