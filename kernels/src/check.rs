//! Argument checks of the MoE ops that both backends share.

use device::{DType, DeviceError, MatMut, MatRef, check_at_least, check_dtype, check_size};

use crate::ExpertParallelLayout;

/// Rejects arguments of `moe_dispatch` unless each token has room on each rank of `spread`.
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

/// Rejects arguments of `eplb_map_experts` unless each row of `experts` has a position or a token index.
pub(crate) fn check_expert_map(
    experts: MatRef<'_>,
    (positions, tokens): (MatRef<'_>, Option<MatRef<'_>>),
    places: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "eplb_map_experts";
    check_dtype(KERNEL, "experts", experts.dtype(), DType::I32)?;
    check_dtype(KERNEL, "positions", positions.dtype(), DType::I32)?;
    check_dtype(KERNEL, "places", places.dtype(), DType::I32)?;
    if let Some(tokens) = tokens {
        check_dtype(KERNEL, "tokens", tokens.dtype(), DType::I32)?;
    }
    let listed = tokens.map_or(positions.cols(), |tokens| tokens.cols());
    check_size(KERNEL, "tokens", listed, experts.rows())
}

/// Rejects arguments of `moe_combine_ranks` unless `places` has a row for each row of `y`, and `y` has the
/// columns of `x`.
pub(crate) fn check_combine(
    y: &MatMut<'_>,
    x: MatRef<'_>,
    places: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = "moe_combine_ranks";
    check_dtype(KERNEL, "places", places.dtype(), DType::I32)?;
    check_dtype(KERNEL, "output", y.dtype(), x.dtype())?;
    check_size(KERNEL, "columns", y.cols(), x.cols())?;
    check_size(KERNEL, "places", places.rows(), y.rows())
}
