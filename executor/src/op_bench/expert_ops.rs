//! Benchmark of the router and the experts of an MoE layer.
//!
//! Legend: T tokens, H hidden size, I intermediate size of an expert, E experts, k experts per token.

use super::dense_ops::{LinearEpilogue, LinearOp, time_linear};
use super::random_weights::{ExpertSize, MatrixSize, RandomWeights, activations, copies, floats};
use super::{OpBenchRunner, OpCase, OpCost};
use crate::ExecutorError;
use models::config::MoeConfig;
use ops::{DType, ExpertsPerToken, PackedExperts, RouterRule};

/// Times the router, top-k routing, routed experts and shared experts.
pub(super) fn time(runner: &mut OpBenchRunner<'_>, moe: &MoeConfig) -> Result<(), ExecutorError> {
    let model = &runner.config().model;
    let (hidden, layers) = (model.hidden, model.sparse_layers());
    let kind = LinearEpilogue::Logits;
    let router = LinearOp { kind, ..LinearOp::plain("router", hidden, moe.experts, layers) };
    time_linear(runner, &router)?;
    time_route(runner, moe)?;
    time_experts(runner, moe)?;
    if moe.shared_intermediate > 0 {
        let inner = moe.shared_intermediate;
        time_linear(runner, &LinearOp::gated("shared_gate_up_silu", hidden, inner, layers))?;
        time_linear(runner, &LinearOp::plain("shared_down_proj", inner, hidden, layers))?;
    }
    Ok(())
}

/// Returns the router rule of the model. A correction bias, if the model has one, is all zeros.
fn rule(runner: &OpBenchRunner<'_>, moe: &MoeConfig) -> Result<RouterRule, ExecutorError> {
    let bias = moe
        .has_correction_bias
        .then(|| runner.ops().zeros(DType::F32, &[moe.experts]))
        .transpose()?;
    let MoeConfig { score, expert_groups: groups, norm_topk_prob: renormalise, scale, .. } = *moe;
    Ok(RouterRule { score, bias, groups, renormalise, scale })
}

fn time_route(runner: &mut OpBenchRunner<'_>, moe: &MoeConfig) -> Result<(), ExecutorError> {
    if !runner.is_selected("route_top_k") {
        return Ok(());
    }
    let (ops, rule, top_k) = (runner.ops(), rule(runner, moe)?, moe.top_k);
    let per_token = ExpertsPerToken::routed(top_k);
    for tokens in runner.token_counts() {
        let logits = floats(ops, DType::F32, tokens, moe.experts)?;
        let bytes = tokens * (moe.experts * 4 + top_k * 8);
        let shape = format!("[{tokens}, {}], {top_k} each", moe.experts);
        let cost = OpCost { bytes: bytes as u64, flops: 0 };
        let case = OpCase { op: "route_top_k", tokens, shape, cost, copies: 1 };
        runner.time(case, &mut |_| ops.moe_route(&logits, per_token, &rule, None).map(drop))?;
    }
    Ok(())
}

fn time_experts(runner: &mut OpBenchRunner<'_>, moe: &MoeConfig) -> Result<(), ExecutorError> {
    if !runner.is_selected("experts") {
        return Ok(());
    }
    let (ops, rule, model) = (runner.ops(), rule(runner, moe)?, &runner.config().model);
    let per_token = ExpertsPerToken::routed(moe.top_k);
    let (hidden, layers) = (model.hidden, model.sparse_layers());
    let size = ExpertSize { experts: moe.experts, hidden, intermediate: moe.intermediate, layers };
    let random = RandomWeights::new(MatrixSize { rows: 2 * moe.intermediate, cols: hidden });
    let first = random.experts(ops, size)?;
    let weight_bytes = first.bytes();
    let layer = MoeLayerSize { weight_bytes, hidden, element: runner.element_bytes() };
    let mut weights: Vec<PackedExperts> = vec![first];
    while weights.len() < copies(weight_bytes, layers) {
        weights.push(random.experts(ops, size)?);
    }
    for tokens in runner.token_counts() {
        let x = activations(ops, tokens, hidden)?;
        let logits = floats(ops, DType::F32, tokens, moe.experts)?;
        let cost = experts_cost(moe, tokens, &layer);
        let shape = format!("[{tokens}, {hidden}], {} of {}", moe.top_k, moe.experts);
        let case = OpCase { op: "experts", tokens, shape, cost, copies: weights.len() };
        runner.time(case, &mut |i| {
            let experts = &weights[i % weights.len()];
            ops.moe(&x, &logits, per_token, &rule, experts, None).map(drop)
        })?;
    }
    Ok(())
}

/// Sizes of an MoE layer from which its cost is computed.
#[derive(Debug, Clone, Copy)]
struct MoeLayerSize {
    /// Bytes of the weights of all experts.
    weight_bytes: usize,
    hidden: usize,
    /// Bytes of an activation element.
    element: usize,
}

/// Cost of routed experts: they read the inputs and the weights of the experts that have tokens (the expected
/// number of such experts for random routing), and write the outputs.
fn experts_cost(moe: &MoeConfig, tokens: usize, layer: &MoeLayerSize) -> OpCost {
    let unreached = (1.0 - moe.top_k as f64 / moe.experts as f64).powi(tokens as i32);
    let weights = layer.weight_bytes as f64 * (1.0 - unreached);
    OpCost {
        bytes: weights as u64 + (2 * tokens * layer.hidden * layer.element) as u64,
        flops: (6 * tokens * moe.top_k * layer.hidden * moe.intermediate) as u64,
    }
}
