//! Mixture of experts (MoE) with a router and shared experts.

use super::expert_exchange::expert_parallel_mlp;
use super::{ResidualStream, RmsNormLayer};
use crate::config::MoeConfig;
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};
use ops::{
    ExpertsPerToken, GateActivation, Ops, PackedExperts, PackedLinear, RouterRule, SecondaryStream,
    SharedExpertPlan, Tensor,
};

/// Mixture of experts of a decoder layer: `x += Σ weight_e · expert_e(h) + shared(h)` with `h = norm(x)`. The
/// sum is over the `top_k` experts that the router selects from the logits `router h`.
///
/// With tensor parallelism, each rank has a part of every expert; with expert parallelism, each rank has some
/// whole experts. All ranks of `f.tp` have the same tokens, so an all-reduce over `f.tp` completes the sum.
/// Ranks of `f.dp` have different tokens and exchange tokens before the experts are computed.
///
/// With tensor parallelism, shared experts may be fused with the routed experts: fused shared experts are
/// stored after the routed experts and have the routing weight 1. With expert parallelism or an expert
/// placement, shared experts are a separate MLP that is computed on the rank of the token, so that no tokens
/// are sent to other ranks for shared experts.
#[derive(Debug)]
pub(crate) struct MoeMlp {
    router: PackedLinear,
    rule: RouterRule,
    experts: PackedExperts,
    /// Shared experts as separate MLPs, used in steps in which fused shared experts would be slower.
    shared: Vec<SharedExpert>,
    /// Gate of the shared expert, `[1, hidden size]`: the output of the shared expert is multiplied by
    /// `sigmoid(gate h)`.
    shared_gate: Option<PackedLinear>,
    top_k: usize,
    layer: usize,
    /// Table with the physical experts of each logical expert; `None` without an expert placement.
    placement: Option<Tensor>,
}

impl MoeMlp {
    pub(crate) fn load(
        config: &MoeConfig,
        w: &Weights<'_>,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let experts = w.experts(layer, config)?;
        let shared = match (config.shared_intermediate, experts.shared()) {
            (0, _) => Vec::new(),
            _ if config.has_shared_gate => vec![SharedExpert::load(&w.at("shared_expert"))?],
            (_, 0) => vec![SharedExpert::load(&w.at("shared_experts"))?],
            _ => SharedExpert::from_fused(&experts),
        };
        let shared_gate = config.has_shared_gate.then(|| w.linear(&["shared_expert_gate"], false));
        Ok(Self {
            router: w.linear(&["gate"], config.has_biases)?,
            experts,
            placement: w.expert_placement(layer, config.experts)?,
            shared,
            shared_gate: shared_gate.transpose()?,
            top_k: config.top_k,
            rule: router_rule(config, w)?,
            layer,
        })
    }

    /// Updates the residual stream `x`, which contains the tokens with the indices `logits_indices`, i32
    /// `[rows]`, or all tokens if `logits_indices` is `None`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let h = x.normed(f, norm)?; // [tokens, hidden size]
        let plan = self.plan_shared_experts(f, h.rows());
        let stream = (plan == SharedExpertPlan::SecondaryStream).then(|| f.ops.secondary_stream());
        let stream = stream.transpose()?;
        let logits = f.ops.linear_f32(&h, &self.router)?; // [tokens, experts]
        if let Some(probe) = f.probe {
            let chosen =
                f.ops.moe_route(&logits, ExpertsPerToken::routed(self.top_k), &self.rule, None)?;
            probe.routes(f.ops, self.layer, &chosen)?;
        }
        let fused = plan == SharedExpertPlan::Fused;
        let shared = if fused { self.experts.shared() } else { 0 };
        let mut y = self.routed_experts(f, &h, &logits, shared, logits_indices)?;
        let separate = self.shared.iter().filter(|_| !fused);
        let ops = stream.as_ref().map_or(f.ops, SecondaryStream::ops);
        let parts =
            separate.map(|shared| shared.forward(ops, &h)).collect::<Result<Vec<_>, _>>()?;
        stream.map_or(Ok(()), |stream| stream.join(f.ops))?;
        let gate = self.shared_gate.as_ref().map(|gate| f.ops.linear_f32(&h, gate)).transpose()?;
        for part in parts {
            match &gate {
                Some(gate) => f.ops.add_gated(&mut y, &part, gate)?, // gate [tokens, 1]
                None => y = f.ops.add(&y, &part)?,
            }
        }
        x.add_partial(f, y)
    }

    fn plan_shared_experts(&self, f: &ForwardContext<'_>, tokens: usize) -> SharedExpertPlan {
        if self.shared.is_empty() {
            return SharedExpertPlan::Fused;
        }
        let gate_up = self.shared.iter().map(|shared| &shared.gate_up_proj);
        f.ops.plan_shared_experts(tokens, &self.experts, gate_up, f.dp.size() > 1)
    }

    /// Computes the routed experts and `shared` fused shared experts for `h [tokens, hidden size]` with
    /// router logits `logits [tokens, experts]`.
    fn routed_experts(
        &self,
        f: &ForwardContext<'_>,
        h: &Tensor,
        logits: &Tensor,
        shared: usize,
        logits_indices: Option<&Tensor>,
    ) -> Result<Tensor, ForwardError> {
        // Padding tokens have KV slot −1 and are not counted. If logits are requested for some tokens only,
        // the step has no padding tokens, so no KV slots are needed.
        let slots = logits_indices.is_none().then_some(&f.batch.slots);
        let counter = f.expert_load.map(|load| load.layer_counter(self.layer, slots));
        let per_token = ExpertsPerToken { top_k: self.top_k, shared };
        if f.dp.size() == 1 && self.placement.is_none() {
            return Ok(f.ops.moe(h, logits, per_token, &self.rule, &self.experts, counter)?);
        }
        let mut routing = f.ops.moe_route(logits, per_token, &self.rule, counter)?;
        if let Some(placement) = &self.placement {
            f.ops.eplb_map_experts(&mut routing, &f.batch.positions, logits_indices, placement)?;
        }
        match f.dp.size() {
            1 => Ok(f.ops.moe_mlp(h, &routing, &self.experts)?),
            _ => expert_parallel_mlp(f, h, &routing, &self.experts),
        }
    }
}

fn router_rule(config: &MoeConfig, w: &Weights<'_>) -> Result<RouterRule, ModelLoadError> {
    let bias = config.has_correction_bias.then(|| w.vector_f32("gate.e_score_correction_bias"));
    let bias = bias.transpose()?;
    let MoeConfig { score, expert_groups: groups, norm_topk_prob: renormalise, scale, .. } =
        *config;
    Ok(RouterRule { score, bias, groups, renormalise, scale })
}

/// One shared expert, or several shared experts combined into one MLP, split over the tensor-parallel ranks.
#[derive(Debug)]
struct SharedExpert {
    gate_up_proj: PackedLinear,
    down_proj: PackedLinear,
}

impl SharedExpert {
    fn load(w: &Weights<'_>) -> Result<Self, ModelLoadError> {
        let gate_up_proj = w.linear(&["gate_proj", "up_proj"], false)?;
        Ok(Self { gate_up_proj, down_proj: w.linear(&["down_proj"], false)? })
    }

    /// Returns the shared experts that are stored after the routed experts in `experts`, as separate MLPs.
    fn from_fused(experts: &PackedExperts) -> Vec<Self> {
        let linears = experts.shared_linears().unwrap_or_default();
        linears
            .into_iter()
            .map(|[gate_up_proj, down_proj]| Self { gate_up_proj, down_proj })
            .collect()
    }

    /// Computes this rank's partial sum of the shared expert output for `h [tokens, hidden size]`; the result
    /// has the shape of `h`.
    fn forward(&self, ops: &Ops, h: &Tensor) -> Result<Tensor, ForwardError> {
        let activation = GateActivation::Silu;
        // [tokens, intermediate size]
        let inner = ops.linear_activation(h, &self.gate_up_proj, activation)?;
        Ok(ops.linear(&inner, &self.down_proj)?)
    }
}
