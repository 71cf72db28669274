//! What every backend checks before it computes or hands addresses to a kernel.

use crate::{DType, DeviceError, MatRef};

/// Refuses a size that differs from the one that would fit.
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

/// Refuses a size below the one that is needed.
pub fn check_at_least(
    kernel: &'static str,
    what: &'static str,
    got: usize,
    least: usize,
) -> Result<(), DeviceError> {
    check_size(kernel, what, got.min(least), least)
}

/// Refuses a size above the one the kernel is made for.
pub fn check_at_most(
    kernel: &'static str,
    what: &'static str,
    got: usize,
    most: usize,
) -> Result<(), DeviceError> {
    check_size(kernel, what, got, got.min(most))
}

/// Refuses an element type that differs from the expected one.
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

/// Refuses rows that do not follow each other without a gap.
pub fn check_dense(
    kernel: &'static str,
    what: &'static str,
    x: MatRef<'_>,
) -> Result<(), DeviceError> {
    if x.rows() <= 1 { Ok(()) } else { check_size(kernel, what, x.stride(), x.cols()) }
}

/// Refuses bytes `[offset, offset + len)` that reach beyond the `bytes` there are.
pub fn check_range(
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
