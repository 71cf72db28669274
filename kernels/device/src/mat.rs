//! Matrix views of device memory: pointer, element type, rows, columns, and elements between rows.
//!
//! A view borrows what it looks at. Host access (`row`) exists because the CPU device is the host.

use std::marker::PhantomData;

use crate::{DType, DeviceElement, DeviceError};

/// A matrix to read; vectors are matrices of one row.
#[derive(Debug, Clone, Copy)]
pub struct MatRef<'a> {
    ptr: *const u8,
    dtype: DType,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a [u8]>,
}

/// A matrix to write.
#[derive(Debug)]
pub struct MatMut<'a> {
    ptr: *mut u8,
    dtype: DType,
    rows: usize,
    /// Rows that its memory holds, itself included: those behind it are nobody's.
    row_capacity: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view behaves like the slice it was made from.
unsafe impl Send for MatRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for MatRef<'_> {}
// SAFETY: as above.
unsafe impl Send for MatMut<'_> {}
// SAFETY: `&MatMut` gives no access to the elements but by reading.
unsafe impl Sync for MatMut<'_> {}

impl<'a> MatRef<'a> {
    /// # Safety
    /// Every row is `cols` initialised elements of `dtype`, aligned, live and unwritten for `'a`.
    pub unsafe fn from_raw(
        ptr: *const u8,
        dtype: DType,
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Self {
        Self { ptr, dtype, rows, cols, stride, life: PhantomData }
    }

    /// Views host elements as a matrix.
    pub fn of<T: DeviceElement>(
        data: &'a [T],
        rows: usize,
        cols: usize,
    ) -> Result<Self, DeviceError> {
        check_len(data.len(), rows, cols)?;
        // SAFETY: the slice holds exactly rows * cols elements for 'a.
        Ok(unsafe { Self::from_raw(data.as_ptr().cast(), T::DTYPE, rows, cols, cols) })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements between the starts of two rows.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// First byte; on the device the matrix was made on.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// First byte of row `r`.
    pub fn row_ptr(&self, r: usize) -> *const u8 {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: inside the matrix.
        unsafe { self.ptr.add(r * self.stride * self.dtype.bytes()) }
    }

    /// Row `r` on the host.
    ///
    /// # Panics
    /// If `T` is not the element type or `r` is outside.
    #[must_use]
    pub fn row<T: DeviceElement>(&self, r: usize) -> &'a [T] {
        assert!(T::DTYPE == self.dtype && r < self.rows, "row {r} as {:?} of {self:?}", T::DTYPE);
        // SAFETY: row and type were checked; `from_raw` vouched for the memory.
        unsafe { std::slice::from_raw_parts(self.ptr.cast::<T>().add(r * self.stride), self.cols) }
    }

    /// Columns `[from, from + cols)` of every row.
    ///
    /// # Panics
    /// If they reach beyond the matrix.
    #[must_use]
    pub fn columns(&self, from: usize, cols: usize) -> Self {
        assert!(from + cols <= self.cols, "columns {from}+{cols} of {}", self.cols);
        // SAFETY: a sub-range of each row.
        Self { ptr: unsafe { self.ptr.add(from * self.dtype.bytes()) }, cols, ..*self }
    }

    /// Rows `[from, from + rows)`.
    ///
    /// # Panics
    /// If they reach beyond the matrix.
    #[must_use]
    pub fn rows_from(&self, from: usize, rows: usize) -> Self {
        assert!(from + rows <= self.rows, "rows {from}+{rows} of {}", self.rows);
        // SAFETY: a sub-range of the rows.
        let ptr = unsafe { self.ptr.add(from * self.stride * self.dtype.bytes()) };
        Self { ptr, rows, ..*self }
    }
}

impl<'a> MatMut<'a> {
    /// # Safety
    /// Every row is `cols` initialised elements of `dtype`, aligned, and only this view uses them for `'a`.
    pub unsafe fn from_raw(
        ptr: *mut u8,
        dtype: DType,
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Self {
        Self { ptr, dtype, rows, row_capacity: rows, cols, stride, life: PhantomData }
    }

    /// The same with memory for `room` rows in all.
    ///
    /// # Safety
    /// As `from_raw`, for so many rows.
    #[must_use]
    pub unsafe fn with_row_capacity(self, room: usize) -> Self {
        Self { row_capacity: room.max(self.rows), ..self }
    }

    /// Rows that may be written, its own included: what products of whole tiles leave behind the last row is
    /// nobody's.
    pub fn row_capacity(&self) -> usize {
        self.row_capacity
    }

    /// Views host elements as a matrix to write.
    pub fn of<T: DeviceElement>(
        data: &'a mut [T],
        rows: usize,
        cols: usize,
    ) -> Result<Self, DeviceError> {
        check_len(data.len(), rows, cols)?;
        // SAFETY: the slice holds exactly rows * cols elements, uniquely borrowed for 'a.
        Ok(unsafe { Self::from_raw(data.as_mut_ptr().cast(), T::DTYPE, rows, cols, cols) })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements between the starts of two rows.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Address of the first element, for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// The same elements, to read.
    #[must_use]
    pub fn as_ref(&self) -> MatRef<'_> {
        // SAFETY: the borrow of self keeps writers away.
        unsafe { MatRef::from_raw(self.ptr, self.dtype, self.rows, self.cols, self.stride) }
    }

    /// A shorter loan of the same elements.
    #[must_use]
    pub fn reborrow(&mut self) -> MatMut<'_> {
        MatMut { ptr: self.ptr, life: PhantomData, ..*self }
    }

    /// Row `r` on the host.
    ///
    /// # Panics
    /// If `T` is not the element type or `r` is outside.
    #[must_use]
    pub fn row_mut<T: DeviceElement>(&mut self, r: usize) -> &mut [T] {
        assert!(T::DTYPE == self.dtype && r < self.rows, "row {r} as {:?} of {self:?}", T::DTYPE);
        // SAFETY: row and type were checked; the unique borrow excludes other users.
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
