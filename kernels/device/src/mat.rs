//! Matrix views of device memory: address, element type, number of rows and columns, and row stride in
//! elements.
//!
//! A view borrows the memory. Access to elements on the host (`row`, `row_mut`) is only valid for host
//! memory.

use std::marker::PhantomData;

use crate::{DType, DeviceElement, DeviceError};

/// Read-only matrix view of device memory; a vector is a matrix with one row.
#[derive(Debug, Clone, Copy)]
pub struct MatRef<'a> {
    ptr: *const u8,
    dtype: DType,
    rows: usize,
    cols: usize,
    stride: usize,
    lifetime: PhantomData<&'a [u8]>,
}

/// Mutable matrix view of device memory.
#[derive(Debug)]
pub struct MatMut<'a> {
    ptr: *mut u8,
    dtype: DType,
    rows: usize,
    /// Number of rows for which memory is available; at least `rows`. Kernels may overwrite the memory after
    /// the first `rows` rows, which contains no data.
    row_capacity: usize,
    cols: usize,
    stride: usize,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `MatRef` gives read access to the elements only, as a shared slice does.
unsafe impl Send for MatRef<'_> {}
// SAFETY: a `MatRef` gives read access to the elements only, as a shared slice does.
unsafe impl Sync for MatRef<'_> {}
// SAFETY: a `MatMut` is the only access to its elements, as a unique slice is.
unsafe impl Send for MatMut<'_> {}
// SAFETY: `&MatMut` only gives read access to the elements.
unsafe impl Sync for MatMut<'_> {}

impl<'a> MatRef<'a> {
    /// Creates a view of raw memory; `stride` is the row stride in elements.
    ///
    /// # Safety
    /// Every row consists of `cols` initialised elements of `dtype` that are aligned, live and not written
    /// for `'a`.
    pub unsafe fn from_raw(
        ptr: *const u8,
        dtype: DType,
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Self {
        Self { ptr, dtype, rows, cols, stride, lifetime: PhantomData }
    }

    /// Views a host slice as a matrix `[rows, cols]`.
    pub fn of<T: DeviceElement>(
        data: &'a [T],
        rows: usize,
        cols: usize,
    ) -> Result<Self, DeviceError> {
        check_len(data.len(), rows, cols)?;
        // SAFETY: the slice has exactly `rows * cols` elements for `'a`.
        Ok(unsafe { Self::from_raw(data.as_ptr().cast(), T::DTYPE, rows, cols, cols) })
    }

    /// Number of rows of the matrix.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns of the matrix.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type of the matrix.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Row stride of the matrix, in elements.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the address of the first element of the matrix in device memory.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Returns the address of the first element of row `r` in device memory.
    pub fn row_ptr(&self, r: usize) -> *const u8 {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: row `r` is inside the matrix.
        unsafe { self.ptr.add(r * self.stride * self.dtype.bytes()) }
    }

    /// Returns row `r` as a slice; the matrix must be in host memory.
    ///
    /// # Panics
    /// If `T` is not the element type or `r` is out of range.
    #[must_use]
    pub fn row<T: DeviceElement>(&self, r: usize) -> &'a [T] {
        assert!(T::DTYPE == self.dtype && r < self.rows, "row {r} as {:?} of {self:?}", T::DTYPE);
        // SAFETY: row and type were checked; the caller of `from_raw` guaranteed the memory.
        unsafe { std::slice::from_raw_parts(self.ptr.cast::<T>().add(r * self.stride), self.cols) }
    }

    /// Returns a view of the columns `[from, from + cols)` of all rows.
    ///
    /// # Panics
    /// If the columns extend beyond the matrix.
    #[must_use]
    pub fn columns(&self, from: usize, cols: usize) -> Self {
        assert!(from + cols <= self.cols, "columns {from}+{cols} of {}", self.cols);
        // SAFETY: the columns are a sub-range of each row.
        Self { ptr: unsafe { self.ptr.add(from * self.dtype.bytes()) }, cols, ..*self }
    }

    /// Returns a view of the rows `[from, from + rows)`.
    ///
    /// # Panics
    /// If the rows extend beyond the matrix.
    #[must_use]
    pub fn rows_from(&self, from: usize, rows: usize) -> Self {
        assert!(from + rows <= self.rows, "rows {from}+{rows} of {}", self.rows);
        // SAFETY: the result is a sub-range of the rows.
        let ptr = unsafe { self.ptr.add(from * self.stride * self.dtype.bytes()) };
        Self { ptr, rows, ..*self }
    }
}

impl<'a> MatMut<'a> {
    /// Creates a mutable view of raw memory; `stride` is the row stride in elements.
    ///
    /// # Safety
    /// Every row consists of `cols` initialised elements of `dtype` that are aligned and that only this view
    /// accesses for `'a`.
    pub unsafe fn from_raw(
        ptr: *mut u8,
        dtype: DType,
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Self {
        Self { ptr, dtype, rows, row_capacity: rows, cols, stride, lifetime: PhantomData }
    }

    /// Sets the row capacity to `row_capacity`, but not below the number of rows.
    ///
    /// # Safety
    /// The contract of `from_raw` is met for `row_capacity` rows.
    #[must_use]
    pub unsafe fn with_row_capacity(self, row_capacity: usize) -> Self {
        Self { row_capacity: row_capacity.max(self.rows), ..self }
    }

    /// Number of rows that kernels may write, at least [`rows`](Self::rows). GEMMs that write whole tiles may
    /// overwrite the memory after the last row, which contains no data.
    pub fn row_capacity(&self) -> usize {
        self.row_capacity
    }

    /// Views a host slice as a mutable matrix `[rows, cols]`.
    pub fn of<T: DeviceElement>(
        data: &'a mut [T],
        rows: usize,
        cols: usize,
    ) -> Result<Self, DeviceError> {
        check_len(data.len(), rows, cols)?;
        // SAFETY: the slice has exactly `rows * cols` elements, uniquely borrowed for `'a`.
        Ok(unsafe { Self::from_raw(data.as_mut_ptr().cast(), T::DTYPE, rows, cols, cols) })
    }

    /// Number of rows of the matrix.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns of the matrix.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type of the matrix.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Row stride of the matrix, in elements.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the address of the first element in device memory, for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// Returns a read-only view of the matrix.
    #[must_use]
    pub fn as_ref(&self) -> MatRef<'_> {
        // SAFETY: the borrow of `self` excludes writers.
        unsafe { MatRef::from_raw(self.ptr, self.dtype, self.rows, self.cols, self.stride) }
    }

    /// Returns a mutable view of the same matrix with a shorter lifetime.
    #[must_use]
    pub fn reborrow(&mut self) -> MatMut<'_> {
        MatMut { ptr: self.ptr, lifetime: PhantomData, ..*self }
    }

    /// Returns row `r` as a mutable slice; the matrix must be in host memory.
    ///
    /// # Panics
    /// If `T` is not the element type or `r` is out of range.
    #[must_use]
    pub fn row_mut<T: DeviceElement>(&mut self, r: usize) -> &mut [T] {
        assert!(T::DTYPE == self.dtype && r < self.rows, "row {r} as {:?} of {self:?}", T::DTYPE);
        // SAFETY: row and type were checked; the unique borrow excludes other accesses.
        unsafe {
            std::slice::from_raw_parts_mut(self.ptr.cast::<T>().add(r * self.stride), self.cols)
        }
    }
}

fn check_len(got: usize, rows: usize, cols: usize) -> Result<(), DeviceError> {
    if rows.checked_mul(cols) == Some(got) {
        return Ok(());
    }
    let expected = rows.saturating_mul(cols);
    Err(DeviceError::Shape { kernel: "view", what: "elements", got, expected })
}
