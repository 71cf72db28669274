//! Errors of ops.

use device::{DType, DeviceError};

/// An op was called with invalid arguments, or the device failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// Shapes contradict each other.
    #[error("{op}: {what} is {got:?}, expected {expected:?}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its shape or size.
        got: Vec<usize>,
        /// The expected shape or size.
        expected: Vec<usize>,
    },
    /// An element type that the op does not support.
    #[error("{op} does not support {dtype:?} as {what}")]
    Dtype {
        /// The op.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its type.
        dtype: DType,
    },
    /// The device has no kernels for activations of a type.
    #[error("{device} does not support activations in {dtype:?}")]
    Activations {
        /// The device.
        device: String,
        /// The type.
        dtype: DType,
    },
    /// The KV pool belongs to another kind of attention (MLA or multi-head).
    #[error("{op}: the pool stores {stores}")]
    Pool {
        /// The op.
        op: &'static str,
        /// What the pool stores.
        stores: &'static str,
    },
    /// A tensor was to be written while another tensor shares its memory.
    #[error("a shared tensor cannot be written")]
    Shared,
    /// The device rejected the call or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Rejects a size that differs from the expected one.
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
