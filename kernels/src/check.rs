//! Argument checks of MoE ops, shared by the CPU and GPU backends.

use device::{DType, DeviceError, MatMut, MatRef, check_at_least, check_dtype, check_size};

use crate::ExpertParallelLayout;

/// Checks the types and sizes of the arguments of `moe_dispatch`: `tokens.cols() >= layout.ranks ·
/// experts.rows()`, since every token may be sent to every rank.
pub(crate) fn check_dispatch(
    tokens: &MatMut<'_>,
    token_rows: &MatMut<'_>,
    counts: &MatMut<'_>,
    experts: MatRef<'_>,
    layout: &ExpertParallelLayout,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "moe_dispatch";
    for (what, dtype) in [
        ("tokens", tokens.dtype()),
        ("token_rows", token_rows.dtype()),
        ("counts", counts.dtype()),
        ("experts", experts.dtype()),
    ] {
        check_dtype(KERNEL, what, dtype, DType::I32)?;
    }
    check_at_least(KERNEL, "experts of a rank", layout.experts_per_rank, 1)?;
    check_at_least(KERNEL, "ranks with the same tokens", layout.rank_stride, 1)?;
    check_at_least(KERNEL, "tokens", tokens.cols(), layout.ranks * experts.rows())?;
    check_size(KERNEL, "rows of token_rows", token_rows.rows(), experts.rows())?;
    check_size(KERNEL, "columns of token_rows", token_rows.cols(), layout.ranks)?;
    check_size(KERNEL, "counts", counts.cols(), layout.ranks)
}

/// Checks the types and sizes of the arguments of `eplb_map_experts`: `experts` must have one row for each
/// entry of `tokens`, or for each entry of `positions` if `tokens` is `None`.
pub(crate) fn check_expert_map(
    experts: MatRef<'_>,
    positions: MatRef<'_>,
    tokens: Option<MatRef<'_>>,
    placement: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "eplb_map_experts";
    check_dtype(KERNEL, "experts", experts.dtype(), DType::I32)?;
    check_dtype(KERNEL, "positions", positions.dtype(), DType::I32)?;
    check_dtype(KERNEL, "placement", placement.dtype(), DType::I32)?;
    if let Some(tokens) = tokens {
        check_dtype(KERNEL, "tokens", tokens.dtype(), DType::I32)?;
    }
    let count = tokens.map_or(positions.cols(), |tokens| tokens.cols());
    check_size(KERNEL, "tokens", count, experts.rows())
}

/// Checks the types and sizes of the arguments of `moe_combine_ranks`: `token_rows` has one row per row of
/// `y`, and `y` has as many columns as `x`.
pub(crate) fn check_combine(
    y: &MatMut<'_>,
    x: MatRef<'_>,
    token_rows: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "moe_combine_ranks";
    check_dtype(KERNEL, "token_rows", token_rows.dtype(), DType::I32)?;
    check_dtype(KERNEL, "output", y.dtype(), x.dtype())?;
    check_size(KERNEL, "columns", y.cols(), x.cols())?;
    check_size(KERNEL, "token_rows", token_rows.rows(), y.rows())
}
