//! Mixture of experts (MoE) with a router and shared experts.

use super::expert_exchange::expert_parallel_mlp;
use super::{ResidualStream, RmsNormLayer};
use crate::config::MoeConfig;
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};
use ops::{
    ExpertsPerToken, PackedExperts, PackedLinear, RouterRule, SharedExpertMlp, SharedExperts,
    Tensor,
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
    shared: SharedExperts,
    top_k: usize,
    layer: usize,
    /// Table with the physical experts of each logical expert; `None` without an expert placement.
    placement: Option<Tensor>,
}

impl MoeMlp {
    /// Loads the router and the experts of layer `layer`.
    pub(crate) fn load(
        config: &MoeConfig,
        w: &Weights<'_>,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        Self::load_scaled(config, w, layer, None)
    }

    /// Loads the router and the experts of layer `layer`; the output of each expert is multiplied by its factor.
    pub(crate) fn load_scaled(
        config: &MoeConfig,
        w: &Weights<'_>,
        layer: usize,
        factors: Option<&[f32]>,
    ) -> Result<Self, ModelLoadError> {
        let experts = w.experts(layer, config, factors)?;
        Ok(Self {
            router: w.linear(&["gate"], config.has_biases)?,
            shared: load_shared(config, w, &experts)?,
            experts,
            placement: w.expert_placement(layer, config.experts)?,
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
        let y = self.output(f, &h, &h, logits_indices)?;
        x.add_partial(f, y)
    }

    /// Returns the output of the experts for `h [tokens, hidden size]`, of which an all-reduce over `f.tp` is the sum.
    /// `router_input` is the input of the router, with the shape of `h`.
    pub(crate) fn output(
        &self,
        f: &ForwardContext<'_>,
        h: &Tensor,
        router_input: &Tensor,
        logits_indices: Option<&Tensor>,
    ) -> Result<Tensor, ForwardError> {
        let exchanges = f.dp.size() > 1;
        let routed = |fused_shared| {
            let logits = f.ops.linear_f32(router_input, &self.router)?; // [tokens, experts]
            self.probe_routes(f, &logits)?;
            self.routed_experts(f, h, &logits, fused_shared, logits_indices)
        };
        f.ops.with_shared_experts(h, &self.experts, &self.shared, exchanges, routed)
    }

    /// Passes the routed experts of each token to the probe (observer of intermediate results), if there is a
    /// probe.
    fn probe_routes(&self, f: &ForwardContext<'_>, logits: &Tensor) -> Result<(), ForwardError> {
        let Some(probe) = f.probe else { return Ok(()) };
        let per_token = ExpertsPerToken::routed(self.top_k);
        probe.routes(f.ops, self.layer, &f.ops.moe_route(logits, per_token, &self.rule, None)?)?;
        Ok(())
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

/// Returns the shared experts, split over the tensor-parallel ranks: those that are packed with the routed
/// experts `experts`, or a separate MLP.
fn load_shared(
    config: &MoeConfig,
    w: &Weights<'_>,
    experts: &PackedExperts,
) -> Result<SharedExperts, ModelLoadError> {
    let load_mlp = |w: Weights<'_>| -> Result<SharedExpertMlp, ModelLoadError> {
        let gate_up = w.linear(&["gate_proj", "up_proj"], false)?;
        Ok(SharedExpertMlp { gate_up, down: w.linear(&["down_proj"], false)? })
    };
    if config.shared_intermediate == 0 {
        return Ok(SharedExperts::default());
    }
    if config.has_shared_gate {
        let gate = w.linear(&["shared_expert_gate"], false)?;
        let mlps = vec![load_mlp(w.at("shared_expert"))?];
        return Ok(SharedExperts { mlps, gate: Some(gate) });
    }
    if experts.has_shared_experts() {
        return Ok(SharedExperts::from_packed(experts));
    }
    Ok(SharedExperts { mlps: vec![load_mlp(w.at("shared_experts"))?], gate: None })
}
