//! Errors of ops.

use device::{DType, DeviceError};

/// An op was called with invalid arguments, or the device failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// The shapes or sizes of the arguments contradict each other.
    #[error("{op}: {what} is {got:?}, expected {expected:?}")]
    Shape {
        /// Name of the op.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// Shape or size of the argument.
        got: Vec<usize>,
        /// Expected shape or size.
        expected: Vec<usize>,
    },
    /// An argument has an element type that the op does not support.
    #[error("{op} does not support {dtype:?} as {what}")]
    Dtype {
        /// Name of the op.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// Element type of the argument, which the op does not support.
        dtype: DType,
    },
    /// The device has no kernels for activations of a type.
    #[error("{device} does not support activations in {dtype:?}")]
    Activations {
        /// Name of the device.
        device: String,
        /// Rejected activation type.
        dtype: DType,
    },
    /// The layout of the KV pool is for another kind of attention (MLA or multi-head).
    #[error("{op}: the pool stores {stores}")]
    Pool {
        /// Name of the op.
        op: &'static str,
        /// Description of what the KV pool stores for each token.
        stores: &'static str,
    },
    /// An op tried to write a tensor that shares its memory with another tensor.
    #[error("a shared tensor cannot be written")]
    Shared,
    /// The device rejected the call or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Returns an error if the size of an argument differs from the expected one.
pub(crate) fn check_size(
    op: &'static str,
    what: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), OpError> {
    if got == expected {
        return Ok(());
    }
    Err(OpError::Shape { op, what, got: vec![got], expected: vec![expected] })
}
