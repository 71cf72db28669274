//! `Tensor`: contiguous elements of one type on the device, with a shape.

use std::sync::Arc;

use device::{DType, MatMut, MatRef};

use crate::OpError;
use crate::arena::TensorStorage;

/// Contiguous, row-major elements on the device. Kernels view the tensor as a matrix of `rows() × cols()`,
/// whose columns are the last dimension. A tensor owns its memory, or shares it with the tensor that it was
/// narrowed from; while the memory is shared, it cannot be written.
#[derive(Debug)]
pub struct Tensor {
    storage: Arc<TensorStorage>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Tensor {
    pub(crate) fn new(storage: TensorStorage, dtype: DType, shape: &[usize]) -> Self {
        Self { storage: Arc::new(storage), dtype, shape: shape.to_vec() }
    }

    /// Returns a tensor in the memory of a foreign host, such as its buffer for hidden states.
    ///
    /// Errors: the buffer is smaller than the tensor.
    pub fn foreign(buffer: device::Buffer, dtype: DType, shape: &[usize]) -> Result<Self, OpError> {
        let tensor = Self::new(TensorStorage::new(buffer, None), dtype, shape);
        tensor.mat()?; // Compares the size of the buffer.
        Ok(tensor)
    }

    /// Sizes of the dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Product of all dimensions but the last; 1 for a vector.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Size of the last dimension.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tensor with the same elements and another shape.
    pub fn reshape(mut self, shape: &[usize]) -> Result<Self, OpError> {
        if shape.iter().product::<usize>() != self.len() {
            let (got, expected) = (shape.to_vec(), self.shape);
            return Err(OpError::Shape { op: "reshape", what: "shape", got, expected });
        }
        self.shape = shape.to_vec();
        Ok(self)
    }

    /// Returns a view of the first `shape.product()` elements, with the shape `shape`. The view shares the
    /// memory, so neither tensor can be written until one of them is dropped.
    pub fn narrow(&self, shape: &[usize]) -> Result<Self, OpError> {
        if shape.iter().product::<usize>() > self.len() {
            let (got, expected) = (shape.to_vec(), self.shape.clone());
            return Err(OpError::Shape { op: "narrow", what: "shape", got, expected });
        }
        Ok(Self { storage: self.storage.clone(), dtype: self.dtype, shape: shape.to_vec() })
    }

    /// Shrinks the tensor to its first `rows` rows, in the same memory.
    pub(crate) fn first_rows(mut self, rows: usize) -> Result<Self, OpError> {
        if self.shape.len() != 2 || rows > self.rows() {
            let (got, expected) = (vec![rows, self.cols()], self.shape);
            return Err(OpError::Shape { op: "first_rows", what: "shape", got, expected });
        }
        self.shape[0] = rows;
        Ok(self)
    }

    /// Returns a view for kernels that read the tensor, `[rows, cols]`.
    pub fn mat(&self) -> Result<MatRef<'_>, OpError> {
        Ok(self.storage.buffer().mat(self.dtype, self.rows(), self.cols())?)
    }

    /// Returns a view for kernels that write the tensor, `[rows, cols]`.
    pub fn mat_mut(&mut self) -> Result<MatMut<'_>, OpError> {
        let (dtype, rows, cols) = (self.dtype, self.rows(), self.cols());
        Ok(self.buffer_mut()?.mat_mut(dtype, rows, cols)?)
    }

    pub(crate) fn buffer(&self) -> &device::Buffer {
        self.storage.buffer()
    }

    pub(crate) fn buffer_mut(&mut self) -> Result<&mut device::Buffer, OpError> {
        Ok(Arc::get_mut(&mut self.storage).ok_or(OpError::Shared)?.buffer_mut())
    }
}
