//! Memory that a caller provides for the result of a forward pass.

use std::cell::RefCell;

use ops::{DType, OpError, Tensor};

use crate::{ForwardContext, ForwardError};

/// Memory for the hidden states of one forward pass, or for the logits of one pass of the LM head, in which the last kernel
/// stores its result.
#[derive(Debug)]
pub struct OutputMemory(RefCell<Option<Tensor>>);

impl OutputMemory {
    /// Provides `tensor` for one result of its shape and type.
    #[must_use]
    pub fn new(tensor: Tensor) -> Self {
        Self(RefCell::new(Some(tensor)))
    }
}

impl ForwardContext<'_> {
    /// Returns the memory of the result of this pass: the memory of the caller if there is any, otherwise memory of the
    /// arena.
    ///
    /// Errors: the memory of the caller has another shape or type.
    pub(crate) fn output(&self, dtype: DType, shape: [usize; 2]) -> Result<Tensor, ForwardError> {
        let Some(tensor) = self.output_memory.and_then(|memory| memory.0.take()) else {
            return Ok(self.ops.scratch(dtype, &shape)?);
        };
        if tensor.dtype() != dtype {
            let (op, what, dtype) = ("output memory", "dtype", tensor.dtype());
            return Err(OpError::Dtype { op, what, dtype }.into());
        }
        if tensor.shape() != shape {
            let (got, expected) = (tensor.shape().to_vec(), shape.to_vec());
            return Err(OpError::Shape { op: "output memory", what: "shape", got, expected }.into());
        }
        Ok(tensor)
    }
}
