//! Expert parallelism over the ranks of `f.dp`, the data-parallel group: each token is sent to the ranks of
//! its experts, and the expert outputs are returned to the rank of the token.

use crate::{ExpertExchangeMethod, ForwardContext, ForwardError};
use ops::{DType, ExpertParallelLayout, ExpertRouting, PackedExperts, Tensor};

/// All-to-all is used if a rank is expected to receive at most this share of all tokens; otherwise all-gather
/// and reduce-scatter are used. At a share of 1, all-to-all moves as many bytes as all-gather and
/// reduce-scatter, and additionally sorts tokens and exchanges counts. These additional costs are only
/// recovered if the share is at most 7/8.
const ALL_TO_ALL_MAX_SHARE: f64 = 7.0 / 8.0;

/// Computes `Σ weight_e · expert_e(h)` over the experts of each token, for `h [tokens, hidden size]`. The
/// experts are distributed over the data-parallel ranks (`f.dp`). The result has the shape of `h`.
///
/// All-gather and all-to-all both sum the expert outputs in f32 in rank order, starting with zero, and the
/// results are bit-identical, with two exceptions: NCCL and RCCL sum in a different order, and in bf16 on a
/// GPU the number of rows determines the kernel.
pub(super) fn expert_parallel_mlp(
    f: &ForwardContext<'_>,
    h: &Tensor,
    own: &ExpertRouting,
    experts: &PackedExperts,
) -> Result<Tensor, ForwardError> {
    if uses_all_to_all(f, own.experts.cols(), experts.len()) {
        all_to_all_experts(f, h, own, experts)
    } else {
        all_gather_experts(f, h, own, experts)
    }
}

/// Whether all-to-all is used. The decision only depends on values that are equal on all ranks.
fn uses_all_to_all(f: &ForwardContext<'_>, top_k: usize, experts_per_rank: usize) -> bool {
    match f.expert_exchange {
        ExpertExchangeMethod::AllGather => false,
        ExpertExchangeMethod::AllToAll => true,
        ExpertExchangeMethod::Auto => {
            rank_share(top_k, experts_per_rank, experts_per_rank * f.dp.size() * f.tp.size())
                <= ALL_TO_ALL_MAX_SHARE
        }
    }
}

/// Expected share of the tokens that are routed to at least one of the `experts_per_rank` experts of a rank,
/// if each token is routed uniformly to `top_k` of the `all` experts.
fn rank_share(top_k: usize, experts_per_rank: usize, all: usize) -> f64 {
    let misses =
        |i: usize| (all - experts_per_rank).saturating_sub(i) as f64 / (all - i).max(1) as f64;
    1.0 - (0..top_k.min(all)).map(misses).product::<f64>()
}

/// Gathers the tokens of all ranks, computes this rank's experts for these tokens, and reduce-scatters the
/// results. Padding rows are not routed to any expert, so that no expert is computed for them.
fn all_gather_experts(
    f: &ForwardContext<'_>,
    h: &Tensor,
    own: &ExpertRouting,
    experts: &PackedExperts,
) -> Result<Tensor, ForwardError> {
    let s = f.ops.stream();
    let gather = |x: &Tensor| -> Result<Tensor, ForwardError> {
        let mut all = f.ops.scratch(x.dtype(), &[f.dp.size() * f.dp_rows, x.cols()])?;
        f.dp.all_gather_rows(s, x.mat()?, all.mat_mut()?)?;
        Ok(all)
    };
    let routing = ExpertRouting { experts: gather(&own.experts)?, weights: gather(&own.weights)? };
    let sums = f.ops.moe_mlp(&gather(h)?, &routing, experts)?; // [ranks · dp_rows, hidden size]
    let mut y = f.ops.scratch(h.dtype(), h.shape())?;
    f.dp.reduce_scatter(s, sums.mat()?, y.mat_mut()?)?;
    Ok(y)
}

/// Sends each token once to every rank that has one of its experts, computes this rank's experts for the
/// received tokens, and returns the results to the ranks of the tokens. Receive buffers have space for the
/// tokens of all ranks, so that their size does not depend on routing.
fn all_to_all_experts(
    f: &ForwardContext<'_>,
    h: &Tensor,
    own: &ExpertRouting,
    experts: &PackedExperts,
) -> Result<Tensor, ForwardError> {
    let (s, rank) = (f.ops.stream(), f.dp.rank());
    let capacity = f.dp.size() * f.dp_rows;
    let dispatch = f.ops.moe_dispatch(own, &expert_parallel_layout(f, experts.len()))?;
    let counts = f.dp.exchange_counts(dispatch.counts())?;
    let receive_buffer = |dtype: DType, cols| {
        f.ops.scratch_with_capacity(capacity, dtype, &[counts.received_by(rank), cols]) // [received, cols]
    };
    let exchange = |x: &Tensor| -> Result<Tensor, ForwardError> {
        let mut received = receive_buffer(x.dtype(), x.cols())?;
        let packed = f.ops.dispatch_rows(x, &dispatch, capacity)?;
        f.dp.all_to_all(s, packed.mat()?, received.mat_mut()?, &counts)?;
        Ok(received)
    };
    let routing =
        ExpertRouting { experts: exchange(&own.experts)?, weights: exchange(&own.weights)? };
    let sums = f.ops.moe_mlp(&exchange(h)?, &routing, experts)?; // [received, hidden size]
    let shape = [counts.sent_by(rank), h.cols()];
    let mut returned = f.ops.scratch_with_capacity(capacity, h.dtype(), &shape)?;
    f.dp.all_to_all(s, sums.mat()?, returned.mat_mut()?, &counts.reversed())?;
    Ok(f.ops.moe_combine_ranks(&returned, &dispatch)?) // [tokens, hidden size]
}

/// Returns the mapping from experts to the ranks of `f.dp` (data-parallel group) that have the same index in
/// `f.tp` (tensor-parallel group) as this rank.
fn expert_parallel_layout(f: &ForwardContext<'_>, experts_per_rank: usize) -> ExpertParallelLayout {
    ExpertParallelLayout {
        experts_per_rank,
        ranks: f.dp.size(),
        rank_stride: f.tp.size(),
        rank_offset: f.tp.rank(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_to_all_is_used_for_few_target_ranks() {
        let uses_all_to_all = |top_k, experts: usize, ranks| {
            rank_share(top_k, experts / ranks, experts) <= ALL_TO_ALL_MAX_SHARE
        };
        let shares = [(8, 128, 2), (2, 8, 2), (8, 128, 8), (8, 256, 8), (4, 64, 4), (8, 64, 4)];
        let results = shares.map(|(k, experts, ranks)| {
            let share = rank_share(k, experts / ranks, experts);
            ((share * 1000.0).round() as u32, uses_all_to_all(k, experts, ranks))
        });
        let expected =
            [(997, false), (786, true), (667, true), (662, true), (694, true), (915, false)];
        assert_eq!(results, expected);
        assert!((rank_share(4, 2, 4) - 1.0).abs() < 1e-12, "top-k of all experts");
        assert!((rank_share(1, 2, 8) - 0.25).abs() < 1e-12);
    }
}
