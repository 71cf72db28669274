//! A mixture of experts behind a router.

use super::exchange::experts_of_all;
use super::{Residual, RmsNorm};
use crate::config::MoeConfig;
use crate::{Forward, ForwardError, LoadError, Weights};
use ops::{Counting, PackedExperts, PackedLinear, RouteRule, Routing, Tensor};

/// `x += Σ weight_e · expert_e(h) + shared(h)` over the `top_k` experts that the router's rule chooses by `router h`, `h = norm(x)`.
///
/// Each rank holds a part of all experts, or some of them whole. Tokens are the same on all ranks of `f.tp`, so a
/// sum over them completes what each has computed; ranks of `f.dp` first get each other's.
#[derive(Debug)]
pub(crate) struct MoeMlp {
    router: PackedLinear,
    rule: RouteRule,
    experts: PackedExperts,
    shared: Option<SharedExperts>,
    top_k: usize,
    layer: usize,
    /// Where copies of experts lie, if an operator has placed them.
    places: Option<Tensor>,
}

impl MoeMlp {
    pub(crate) fn load(
        config: &MoeConfig,
        w: &Weights<'_>,
        layer: usize,
    ) -> Result<Self, LoadError> {
        Ok(Self {
            router: w.linear(&["gate"], false)?,
            experts: w.at("experts").experts(layer, config.experts)?,
            places: w.expert_places(layer, config.experts)?,
            shared: match config.shared_intermediate {
                0 => None,
                _ => Some(SharedExperts::load(&w.at("shared_experts"))?),
            },
            top_k: config.top_k,
            rule: rule(config, w)?,
            layer,
        })
    }

    /// The stream is of the tokens `asked`, i32 `[T]`, or of all.
    pub(crate) fn forward(
        &self,
        f: &Forward<'_>,
        x: &mut Residual,
        norm: &RmsNorm,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let h = x.normed(f, norm)?; // [T, H]
        let logits = f.ops.linear_f32(&h, &self.router)?; // [T, E]
        // Steps that are asked about some tokens alone have no padding.
        let slots = asked.is_none().then_some(&f.batch.slots);
        let counting = f.load.map(|load| load.counting(self.layer, slots));
        let watched = f.probe.is_some() || self.places.is_some();
        let mut y = if !watched && f.dp.size() == 1 && self.rule.is_plain() {
            let of_token = (self.top_k, self.rule.normalise);
            f.ops.moe(&h, &logits, of_token, &self.experts, counting)?
        } else {
            let mut routing = self.route(f, &logits, counting)?;
            if let Some(probe) = f.probe {
                probe.routes(f.ops, self.layer, &routing)?;
            }
            if let Some(places) = &self.places {
                f.ops.place_experts(&mut routing, (&f.batch.positions, asked), places)?;
            }
            match f.dp.size() {
                1 => f.ops.moe_mlp(&h, &routing, &self.experts)?,
                _ => experts_of_all(f, &h, &routing, &self.experts)?,
            }
        }; // [T, H]
        if let Some(shared) = &self.shared {
            y = f.ops.add(&y, &shared.forward(f, &h)?)?;
        }
        x.add_partial(f, y)
    }

    fn route(
        &self,
        f: &Forward<'_>,
        logits: &Tensor,
        counting: Option<Counting<'_>>,
    ) -> Result<Routing, ForwardError> {
        Ok(if self.rule.is_plain() {
            f.ops.moe_route_softmax(logits, self.top_k, self.rule.normalise, counting)?
        } else {
            f.ops.moe_route(logits, self.top_k, &self.rule, counting)?
        })
    }
}

fn rule(config: &MoeConfig, w: &Weights<'_>) -> Result<RouteRule, LoadError> {
    let bias = config.corrected.then(|| w.vector_f32("gate.e_score_correction_bias"));
    let bias = bias.transpose()?;
    let MoeConfig { score, groups, normalise, scale, .. } = *config;
    Ok(RouteRule { score, bias, groups, normalise, scale })
}

/// Experts that every token goes to, as one MLP. Each rank of `f.tp` holds a part of it.
#[derive(Debug)]
struct SharedExperts {
    gate_up: PackedLinear,
    down: PackedLinear,
}

impl SharedExperts {
    fn load(w: &Weights<'_>) -> Result<Self, LoadError> {
        let gate_up = w.linear(&["gate_proj", "up_proj"], false)?;
        Ok(Self { gate_up, down: w.linear(&["down_proj"], false)? })
    }

    /// This rank's part of the sum: `h`, result `[T, H]`.
    fn forward(&self, f: &Forward<'_>, h: &Tensor) -> Result<Tensor, ForwardError> {
        let inner = f.ops.linear_silu_mul(h, &self.gate_up)?; // [T, I]
        Ok(f.ops.linear(&inner, &self.down)?)
    }
}
