//! Checks of kernel arguments, which every backend performs before it computes or launches a kernel.

use crate::{DType, DeviceError, MatRef};

/// Returns [`DeviceError::Shape`] if the size of a kernel argument differs from the expected size.
pub fn check_size(
    kernel: &'static str,
    what: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), DeviceError> {
    if got == expected {
        return Ok(());
    }
    Err(DeviceError::Shape { kernel, what, got, expected })
}

/// Returns [`DeviceError::Shape`] if the size of a kernel argument is less than the required minimum.
pub fn check_at_least(
    kernel: &'static str,
    what: &'static str,
    got: usize,
    min: usize,
) -> Result<(), DeviceError> {
    check_size(kernel, what, got.min(min), min)
}

/// Returns [`DeviceError::Shape`] if the size of a kernel argument exceeds the maximum of the kernel.
pub fn check_at_most(
    kernel: &'static str,
    what: &'static str,
    got: usize,
    max: usize,
) -> Result<(), DeviceError> {
    check_size(kernel, what, got, got.min(max))
}

/// Returns [`DeviceError::Unsupported`] if the element type of a kernel argument differs from the expected
/// type.
pub fn check_dtype(
    kernel: &'static str,
    what: &'static str,
    got: DType,
    expected: DType,
) -> Result<(), DeviceError> {
    if got == expected {
        return Ok(());
    }
    Err(DeviceError::Unsupported { kernel, what, dtype: got })
}

/// Returns [`DeviceError::Shape`] if the rows of a kernel argument are not contiguous in memory.
pub fn check_dense(
    kernel: &'static str,
    what: &'static str,
    x: MatRef<'_>,
) -> Result<(), DeviceError> {
    if x.rows() <= 1 { Ok(()) } else { check_size(kernel, what, x.stride(), x.cols()) }
}

/// Returns [`DeviceError::Shape`] if the byte range `[offset, offset + len)` exceeds a size of `bytes` bytes.
pub(crate) fn check_range(
    kernel: &'static str,
    offset: usize,
    len: usize,
    bytes: usize,
) -> Result<(), DeviceError> {
    match offset.checked_add(len) {
        Some(end) if end <= bytes => Ok(()),
        _ => Err(DeviceError::Shape {
            kernel,
            what: "end of the range",
            got: offset.saturating_add(len),
            expected: bytes,
        }),
    }
}
