//! MoE routers, expert MLPs and the dispatch of tokens to EP ranks. Legend: T tokens, E experts, k routed
//! experts per token, H hidden size.

use device::{MatMut, MatRef};

use crate::{
    ExpertLoadArgs, ExpertParallelLayout, ExpertWeights, RouterLogits, RouterRuleArgs, TopKRoutes,
};

/// Softmax over the logits, then the `k` largest, the lower index first among equals, followed by the shared
/// experts. The `k` selected experts are added to `load`.
#[derive(Debug)]
pub struct SoftmaxRouting<'a, 'b> {
    /// i32 `[T, k + shared]`
    pub experts: MatMut<'a>,
    /// f32 `[T, k + shared]`
    pub weights: MatMut<'a>,
    /// Logits and number of experts per token.
    pub router: &'a RouterLogits<'a>,
    /// Token counts by expert.
    pub load: Option<&'a mut ExpertLoadArgs<'b>>,
}

/// Experts of each token by any routing rule, best first, followed by the shared experts. The `k` selected
/// experts are added to `load`.
#[derive(Debug)]
pub struct RuleRouting<'a, 'b> {
    /// i32 `[T, k + shared]`
    pub experts: MatMut<'a>,
    /// f32 `[T, k + shared]`
    pub weights: MatMut<'a>,
    /// f32 `[T, E]`
    pub logits: MatRef<'a>,
    /// Scores, groups and scaling.
    pub rule: &'a RouterRuleArgs<'a>,
    /// Token counts by expert.
    pub load: Option<&'a mut ExpertLoadArgs<'b>>,
}

/// [`SoftmaxRouting`] and [`ExpertMlp`] in one launch, with the same results. GPU only; see
/// [`RoutedExpertMlp::supports`].
#[derive(Debug)]
pub struct RoutedExpertMlp<'a, 'b> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// `[T, H]`
    pub x: MatRef<'a>,
    /// Logits and number of experts per token.
    pub router: &'a RouterLogits<'a>,
    /// Experts of this rank.
    pub experts: &'a ExpertWeights<'a>,
    /// Token counts by expert.
    pub load: Option<&'a mut ExpertLoadArgs<'b>>,
}

/// Maps logical experts to physical experts by the EPLB map: a token takes one of the replicas of an expert
/// by its position.
///
/// Errors on the CPU: a token or an expert does not exist. On GPUs such an expert becomes -1, which no rank
/// computes.
#[derive(Debug)]
pub struct ExpertPlacementLookup<'a> {
    /// i32 `[T, k]`, replaced in place.
    pub experts: MatMut<'a>,
    /// Position of each token; i32 `[1, P]`
    pub positions: MatRef<'a>,
    /// Token index of each row, i32 `[1, T]`; `None` = row index.
    pub tokens: Option<MatRef<'a>>,
    /// EPLB map; row `e` is the number of replicas of expert `e`, then their physical experts; i32.
    pub placement: MatRef<'a>,
}

/// Lists the tokens that each EP rank receives: each token with an expert on that rank, once. `tokens` has
/// the tokens for rank 0 in ascending order, then those for rank 1, and so on; `counts` has the number of
/// tokens per rank. `token_rows` has the index of each token's entry in `tokens` for each rank, or -1.
#[derive(Debug)]
pub struct TokenDispatch<'a> {
    /// i32 `[1, ranks · T]`
    pub tokens: MatMut<'a>,
    /// i32 `[T, ranks]`
    pub token_rows: MatMut<'a>,
    /// i32 `[1, ranks]`
    pub counts: MatMut<'a>,
    /// i32 `[T, k]`
    pub experts: MatRef<'a>,
    /// Experts of each rank.
    pub layout: &'a ExpertParallelLayout,
}

/// Writes `y[t]`, the sum of the rows `token_rows[t]` of `x` in that order, in f32, rounded once; -1 adds
/// nothing.
#[derive(Debug)]
pub struct MoeCombine<'a> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// `[n, H]`
    pub x: MatRef<'a>,
    /// i32 `[T, m]`
    pub token_rows: MatRef<'a>,
}

/// `y = Σ weight · down(silu(gate x) · up x)` over the experts of a token in ascending order, summed in f32.
/// A GPU may round the output of each expert to bf16 for large numbers of tokens.
#[derive(Debug)]
pub struct ExpertMlp<'a> {
    /// `[T, H]`
    pub y: MatMut<'a>,
    /// `[T, H]`
    pub x: MatRef<'a>,
    /// Experts and weights of each token.
    pub routes: &'a TopKRoutes<'a>,
    /// Experts of this rank.
    pub experts: &'a ExpertWeights<'a>,
}
