//! MoE ops: routers, expert MLPs, EPLB lookup, and dispatch and combine of tokens over EP ranks.

use device::{MatMut, MatRef};

use crate::{
    ExpertLoadArgs, ExpertParallelLayout, ExpertWeights, RouterRuleArgs, SoftmaxRouterArgs,
    TopKRoutes,
};

/// Routes tokens by softmax over the logits: the `top_k` experts with the largest scores, the lower index
/// first among equals, followed by the shared experts. Adds the `top_k` selected experts to `load`.
#[derive(Debug)]
pub struct SoftmaxRouting<'a, 'b> {
    /// Selected experts; i32 `[tokens, top_k + shared]`.
    pub experts: MatMut<'a>,
    /// Routing weights; f32 `[tokens, top_k + shared]`.
    pub weights: MatMut<'a>,
    /// Logits, and the settings of softmax routing.
    pub router: &'a SoftmaxRouterArgs<'a>,
    /// Token counts by expert; `None` = selected experts are not counted.
    pub load: Option<&'a mut ExpertLoadArgs<'b>>,
}

/// Routes tokens by any routing rule: the `top_k` experts with the largest scores, best first, followed by
/// the shared experts. Adds the `top_k` selected experts to `load`.
#[derive(Debug)]
pub struct GroupedTopKRouting<'a, 'b> {
    /// Selected experts; i32 `[tokens, top_k + shared]`.
    pub experts: MatMut<'a>,
    /// Routing weights; f32 `[tokens, top_k + shared]`.
    pub weights: MatMut<'a>,
    /// Router logits; f32 `[tokens, experts]`.
    pub logits: MatRef<'a>,
    /// Score function, expert groups and scaling of the routing weights.
    pub rule: &'a RouterRuleArgs<'a>,
    /// Token counts by expert; `None` = selected experts are not counted.
    pub load: Option<&'a mut ExpertLoadArgs<'b>>,
}

/// [`SoftmaxRouting`] and [`ExpertMlp`] in one launch, with equal results. GPU only;
/// [`FusedMoe::supports`] gives the supported shapes.
#[derive(Debug)]
pub struct FusedMoe<'a, 'b> {
    /// Output, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Input, `[tokens, hidden_size]`.
    pub x: MatRef<'a>,
    /// Logits, and the settings of softmax routing.
    pub router: &'a SoftmaxRouterArgs<'a>,
    /// Weights of the experts on this rank.
    pub experts: &'a ExpertWeights<'a>,
    /// Token counts by expert; `None` = selected experts are not counted.
    pub load: Option<&'a mut ExpertLoadArgs<'b>>,
}

/// Replaces logical expert ids by physical expert ids, according to the EPLB (expert parallelism load
/// balancer) map. If an expert has several replicas (physical experts), the position of the token selects one
/// of them.
///
/// Errors on the CPU: a token or an expert does not exist. On GPUs such an expert becomes −1, which no rank
/// computes.
#[derive(Debug)]
pub struct ExpertPlacementLookup<'a> {
    /// Selected experts, replaced in place: i32 `[rows, top_k]`.
    pub experts: MatMut<'a>,
    /// Position of each token; i32 `[1, tokens]`.
    pub positions: MatRef<'a>,
    /// Token index of each row of `experts`, i32 `[1, rows]`; `None` = row `t` belongs to token `t`.
    pub tokens: Option<MatRef<'a>>,
    /// EPLB map, i32: row `e` has the number of replicas of logical expert `e`, followed by the indices of
    /// its physical experts.
    pub placement: MatRef<'a>,
}

/// Lists the tokens to send to each EP rank: every token that selected at least one expert of the rank is
/// listed once. `tokens` has the tokens for rank 0 in ascending order, then the tokens for rank 1, and so on;
/// `counts` has the number of tokens per rank. `token_rows` has the index of each token's entry in `tokens`
/// for each rank, or −1.
#[derive(Debug)]
pub struct MoeDispatchLayout<'a> {
    /// Indices of the tokens to send, grouped by destination rank; i32 `[1, ranks · tokens]`.
    pub tokens: MatMut<'a>,
    /// Index in `tokens` by token and rank; i32 `[tokens, ranks]`.
    pub token_rows: MatMut<'a>,
    /// Number of tokens to send to each rank; i32 `[1, ranks]`.
    pub counts: MatMut<'a>,
    /// Selected experts; i32 `[tokens, top_k]`.
    pub experts: MatRef<'a>,
    /// Distribution of experts over the EP ranks.
    pub layout: &'a ExpertParallelLayout,
}

/// Sums the expert outputs that the EP ranks returned: `y[t]` is the sum of the rows of `x` with indices
/// `token_rows[t]`, added in this order in f32 and rounded once. An index of −1 is skipped.
#[derive(Debug)]
pub struct MoeCombine<'a> {
    /// Combined outputs, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Expert outputs that the EP ranks returned, `[returned_rows, hidden_size]`.
    pub x: MatRef<'a>,
    /// Row indices in `x` to sum for each token; i32 `[tokens, summands]`.
    pub token_rows: MatRef<'a>,
}

/// Expert MLPs, `y = Σ weight · down(activation(gate x, up x))` over the experts of a token in ascending order,
/// summed in f32. A GPU may round the output of each expert to bf16 for large numbers of tokens.
#[derive(Debug)]
pub struct ExpertMlp<'a> {
    /// Output, `[tokens, hidden_size]`.
    pub y: MatMut<'a>,
    /// Input, `[tokens, hidden_size]`.
    pub x: MatRef<'a>,
    /// Selected experts and routing weights of each token.
    pub routes: &'a TopKRoutes<'a>,
    /// Weights of the experts on this rank.
    pub experts: &'a ExpertWeights<'a>,
}
