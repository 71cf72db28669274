//! What every backend checks before it computes or hands addresses to a kernel.

use crate::{DType, DeviceError, ExpertParallelLayout, MatMut, MatRef};

/// Refuses a size that differs from the one that would fit.
pub(crate) fn check_size(
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
pub(crate) fn check_at_least(
    kernel: &'static str,
    what: &'static str,
    got: usize,
    least: usize,
) -> Result<(), DeviceError> {
    check_size(kernel, what, got.min(least), least)
}

/// Refuses a size above the one the kernel is made for.
pub(crate) fn check_at_most(
    kernel: &'static str,
    what: &'static str,
    got: usize,
    most: usize,
) -> Result<(), DeviceError> {
    check_size(kernel, what, got, got.min(most))
}

/// Refuses an element type that differs from the expected one.
pub(crate) fn check_dtype(
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
pub(crate) fn check_dense(
    kernel: &'static str,
    what: &'static str,
    x: MatRef<'_>,
) -> Result<(), DeviceError> {
    if x.rows() <= 1 { Ok(()) } else { check_size(kernel, what, x.stride(), x.cols()) }
}

/// Refuses bytes `[offset, offset + len)` that reach beyond the `bytes` there are.
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

/// Fails unless `moe_dispatch` has room for each token on each rank of `spread`.
pub(crate) fn check_dispatch(
    tokens: &MatMut<'_>,
    places: &MatMut<'_>,
    counts: &MatMut<'_>,
    experts: MatRef<'_>,
    spread: &ExpertParallelLayout,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "moe_dispatch";
    for (what, dtype) in [
        ("tokens", tokens.dtype()),
        ("places", places.dtype()),
        ("counts", counts.dtype()),
        ("experts", experts.dtype()),
    ] {
        check_dtype(KERNEL, what, dtype, DType::I32)?;
    }
    check_at_least(KERNEL, "experts of a rank", spread.experts_per_rank, 1)?;
    check_at_least(KERNEL, "ranks with the same tokens", spread.rank_stride, 1)?;
    check_at_least(KERNEL, "tokens", tokens.cols(), spread.ranks * experts.rows())?;
    check_size(KERNEL, "rows of places", places.rows(), experts.rows())?;
    check_size(KERNEL, "columns of places", places.cols(), spread.ranks)?;
    check_size(KERNEL, "counts", counts.cols(), spread.ranks)
}

/// Fails unless `place_experts` has a position, or a named token, for each row of `experts`.
pub(crate) fn check_expert_map(
    experts: MatRef<'_>,
    (positions, tokens): (MatRef<'_>, Option<MatRef<'_>>),
    places: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "place_experts";
    check_dtype(KERNEL, "experts", experts.dtype(), DType::I32)?;
    check_dtype(KERNEL, "positions", positions.dtype(), DType::I32)?;
    check_dtype(KERNEL, "places", places.dtype(), DType::I32)?;
    if let Some(tokens) = tokens {
        check_dtype(KERNEL, "tokens", tokens.dtype(), DType::I32)?;
    }
    let listed = tokens.map_or(positions.cols(), |tokens| tokens.cols());
    check_size(KERNEL, "tokens", listed, experts.rows())
}

/// Fails unless `sum_rows` has a row of `places` for each of `y`, whose columns are those of `x`.
pub(crate) fn check_combine(
    y: &MatMut<'_>,
    x: MatRef<'_>,
    places: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "sum_rows";
    check_dtype(KERNEL, "places", places.dtype(), DType::I32)?;
    check_dtype(KERNEL, "output", y.dtype(), x.dtype())?;
    check_size(KERNEL, "columns", y.cols(), x.cols())?;
    check_size(KERNEL, "places", places.rows(), y.rows())
}
