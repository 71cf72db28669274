//! Mixture of experts: T tokens, E experts, k choices a token.

use kernels::{DType, ExpertGroups, Experts, HostMat, PackedGroup, RouterScore, Routes, Scores};

use crate::error::check_size;
use crate::{Counting, OpError, Ops, Tensor};

/// Which experts each token goes to.
#[derive(Debug)]
pub struct Routing {
    /// i32 `[T, k]`, best first.
    pub experts: Tensor,
    /// f32 `[T, k]`.
    pub weights: Tensor,
}

/// How a router's logits become choices. See [`kernels::RouteRule`].
#[derive(Debug)]
pub struct RouteRule {
    /// From logits to scores.
    pub score: RouterScore,
    /// Added to the scores for the choice alone; f32 `[E]`.
    pub bias: Option<Tensor>,
    /// Experts that are chosen by groups first.
    pub groups: Option<ExpertGroups>,
    /// Whether a token's weights are divided by their sum.
    pub normalise: bool,
    /// What weights are multiplied by at the end.
    pub scale: f32,
}

impl RouteRule {
    /// Whether it is softmax over all experts and nothing else.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        let Self { score, bias, groups, scale, .. } = self;
        let softmax = *score == RouterScore::Softmax && scale.to_bits() == 1f32.to_bits();
        softmax && bias.is_none() && groups.is_none()
    }
}

/// The experts of one layer on this rank, packed.
#[derive(Debug)]
pub struct PackedExperts {
    first: usize,
    gate_up: PackedGroup,
    down: PackedGroup,
}

impl PackedExperts {
    /// Experts held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.down.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.down.is_empty()
    }

    /// Element type of the weights on the device.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.down.dtype()
    }

    fn on_rank(&self) -> Experts<'_> {
        Experts { first: self.first, gate_up: &self.gate_up, down: &self.down }
    }

    /// Bytes of the weights on the device.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }
}

impl Ops {
    /// Packs experts, the first of which is number `first` of all; the model has as many in each of `layers` layers. For
    /// each, `gate_up` holds parts that stack to `[2 I, H]`, gate rows first, and `down` one matrix `[H, I]`.
    pub fn pack_experts(
        &self,
        (first, layers): (usize, usize),
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
    ) -> Result<PackedExperts, OpError> {
        let dtype = self.device.experts_dtype(gate_up, down, layers, self.dtype());
        let gate_up = self.device.pack_group(gate_up, dtype, true)?;
        let down = self.device.pack_group(down, dtype, false)?;
        check_size("pack_experts", "down projections", down.len(), gate_up.len())?;
        check_size("pack_experts", "outputs of gate_up", gate_up.n(), 2 * down.k())?;
        check_size("pack_experts", "outputs of down", down.n(), gate_up.k())?;
        Ok(PackedExperts { first, gate_up, down })
    }

    /// Softmax over the router's `logits` f32 `[T, E]`, then the `k` largest, the lower index first
    /// among equals; with `normalise` each token's weights are divided by their sum. Choices are counted where `counting` says.
    pub fn moe_route_softmax(
        &self,
        logits: &Tensor,
        k: usize,
        normalise: bool,
        counting: Option<Counting<'_>>,
    ) -> Result<Routing, OpError> {
        let mut experts = self.scratch(DType::I32, &[logits.rows(), k])?;
        let mut weights = self.scratch(DType::F32, &[logits.rows(), k])?;
        let (s, logits) = (&self.stream, logits.mat()?);
        let (out, out_weights) = (experts.mat_mut()?, weights.mat_mut()?);
        Counting::with(counting, |count| {
            Ok(self.device.moe_route_softmax(s, out, out_weights, logits, normalise, count)?)
        })?;
        Ok(Routing { experts, weights })
    }

    /// The `k` experts of each token by `rule`, best first: `logits` f32 `[T, E]`. Choices are counted where `counting` says.
    pub fn moe_route(
        &self,
        logits: &Tensor,
        k: usize,
        rule: &RouteRule,
        counting: Option<Counting<'_>>,
    ) -> Result<Routing, OpError> {
        let mut experts = self.scratch(DType::I32, &[logits.rows(), k])?;
        let mut weights = self.scratch(DType::F32, &[logits.rows(), k])?;
        let RouteRule { score, bias, groups, normalise, scale } = rule;
        let bias = bias.as_ref().map(Tensor::mat).transpose()?;
        let (groups, normalise, scale) = (*groups, *normalise, *scale);
        let rule = kernels::RouteRule { score: *score, bias, groups, normalise, scale };
        let (s, logits) = (&self.stream, logits.mat()?);
        let (out, out_weights) = (experts.mat_mut()?, weights.mat_mut()?);
        Counting::with(counting, |count| {
            Ok(self.device.moe_route(s, out, out_weights, logits, &rule, count)?)
        })?;
        Ok(Routing { experts, weights })
    }

    /// [`Ops::moe_route_softmax`] and [`Ops::moe_mlp`] where nobody wants to know more of the routing than numbers.
    pub fn moe(
        &self,
        x: &Tensor,
        logits: &Tensor,
        (k, normalise): (usize, bool),
        experts: &PackedExperts,
        counting: Option<Counting<'_>>,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), x.shape())?;
        let scores = Scores { logits: logits.mat()?, top_k: k, normalise };
        let (s, out) = (&self.stream, y.mat_mut()?);
        let (x_mat, held) = (x.mat()?, experts.on_rank());
        let done = Counting::with(counting, |count| {
            Ok(self.device.moe_mlp_of_scores(s, out, x_mat, &scores, &held, count)?)
        })?;
        if done {
            return Ok(y);
        }
        drop(y);
        self.moe_mlp(x, &self.moe_route_softmax(logits, k, normalise, counting)?, experts)
    }

    /// Where the copies of each expert lie: `places [E, 1 + most]` row by row, their number first.
    pub fn expert_places(&self, places: &[i32], cols: usize) -> Result<Tensor, OpError> {
        let mut tensor = self.zeros(DType::I32, &[places.len() / cols.max(1), cols])?;
        let bytes: Vec<u8> = places.iter().flat_map(|place| place.to_le_bytes()).collect();
        self.device.upload(tensor.buffer_mut()?, 0, &bytes)?;
        Ok(tensor)
    }

    /// Sends each token to one of the copies of its experts: `routing` names places then. It goes by the token's position: `positions [P]` has
    /// those of `tokens [T]`, or of all in order.
    pub fn place_experts(
        &self,
        routing: &mut Routing,
        (positions, tokens): (&Tensor, Option<&Tensor>),
        places: &Tensor,
    ) -> Result<(), OpError> {
        let (s, experts) = (&self.stream, routing.experts.mat_mut()?);
        let tokens = tokens.map(Tensor::mat).transpose()?;
        Ok(self.device.place_experts(s, experts, positions.mat()?, tokens, places.mat()?)?)
    }

    /// `y = Σ weight · down(silu(gate x) · up x)` over a token's experts on this rank in ascending
    /// order, summed in f32: `x`, `y [T, H]`.
    pub fn moe_mlp(
        &self,
        x: &Tensor,
        routing: &Routing,
        experts: &PackedExperts,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), x.shape())?;
        let routes = Routes { experts: routing.experts.mat()?, weights: routing.weights.mat()? };
        let (s, out) = (&self.stream, y.mat_mut()?);
        self.device.moe_mlp(s, out, x.mat()?, &routes, &experts.on_rank())?;
        Ok(y)
    }
}
