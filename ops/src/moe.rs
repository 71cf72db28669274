//! Mixture-of-experts ops: routing, EPLB mapping and expert MLPs.

use device::DType;
use kernels::{
    ExpertGroups, ExpertMlp, ExpertPlacementLookup, ExpertWeights, FusedMoe, GateActivation,
    GroupedTopKRouting, PackedMatrixGroup, RouterScoreFunction, SoftmaxRouterArgs, SoftmaxRouting,
    TopKRoutes,
};

use crate::launch_plan::SharedExpertPlan;
use crate::{LayerExpertLoadCounter, OpError, Ops, PackedLinear, Tensor};

/// Experts to which each token is routed, and their weights.
#[derive(Debug)]
pub struct ExpertRouting {
    /// Expert indices, i32 `[tokens, experts per token]`, best first; fused shared experts come after the
    /// routed experts.
    pub experts: Tensor,
    /// Routing weights, f32, with the shape of `experts`.
    pub weights: Tensor,
}

/// Number of experts that compute each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsPerToken {
    /// Number of routed experts that the router selects.
    pub top_k: usize,
    /// Number of fused shared experts, whose indices follow the indices of the routed experts.
    pub shared: usize,
}

impl ExpertsPerToken {
    /// Returns the selection of `top_k` routed experts without fused shared experts.
    #[must_use]
    pub fn routed(top_k: usize) -> Self {
        Self { top_k, shared: 0 }
    }
}

/// Rule by which a router's logits select experts and their weights. See [`kernels::RouterRuleArgs`].
#[derive(Debug)]
pub struct RouterRule {
    /// Function that computes expert scores from router logits.
    pub score: RouterScoreFunction,
    /// Score correction bias, which is added to the scores for the selection alone; f32 `[experts]`.
    pub bias: Option<Tensor>,
    /// Expert groups, some of which are selected before the experts (group-limited routing).
    pub groups: Option<ExpertGroups>,
    /// Whether the routing weights of a token's experts are divided by their sum.
    pub renormalise: bool,
    /// Factor by which the final routing weights are multiplied.
    pub scale: f32,
}

impl RouterRule {
    /// Whether the rule is a softmax over all experts, without correction bias, expert groups or scale
    /// factor.
    fn is_plain(&self) -> bool {
        let Self { score, bias, groups, scale, .. } = self;
        let softmax = *score == RouterScoreFunction::Softmax && scale.to_bits() == 1f32.to_bits();
        softmax && bias.is_none() && groups.is_none()
    }

    /// Returns the rule as the kernels take it, with `shared` fused shared experts.
    fn kernel_args(&self, shared: usize) -> Result<kernels::RouterRuleArgs<'_>, OpError> {
        let Self { score, groups, renormalise, scale, .. } = *self;
        let bias = self.bias.as_ref().map(Tensor::mat).transpose()?;
        Ok(kernels::RouterRuleArgs { score, bias, groups, renormalise, scale, shared })
    }
}

/// Biases of the experts of one layer on this rank.
#[derive(Debug)]
pub struct ExpertBiases {
    /// Biases of the gate and up projections, f32 `[experts, 2 · intermediate_size]`.
    pub gate_up: Tensor,
    /// Biases of the down projections, f32 `[experts, hidden_size]`.
    pub down: Tensor,
}

/// Experts of one layer on this rank, packed for the device.
#[derive(Debug)]
pub struct PackedExperts {
    pub(crate) first: usize,
    pub(crate) gate_up: PackedMatrixGroup,
    pub(crate) down: PackedMatrixGroup,
    pub(crate) activation: GateActivation,
    pub(crate) biases: Option<ExpertBiases>,
    /// Number of shared experts after the routed experts: every token is routed to them.
    pub(crate) shared: usize,
    /// Gate-up and down projections of all shared experts as one MLP, in separate memory.
    pub(crate) separate_shared: Option<[PackedLinear; 2]>,
}

impl PackedExperts {
    /// Number of shared experts that are packed after the routed experts.
    pub(crate) fn shared(&self) -> usize {
        self.shared
    }

    /// Whether the shared experts of the layer are packed: after the routed experts, as a separate MLP, or both.
    #[must_use]
    pub fn has_shared_experts(&self) -> bool {
        self.shared > 0 || self.separate_shared.is_some()
    }

    /// Returns the gate-up and down projections of each shared expert in the packed memory of all experts;
    /// or, if there is a separate MLP, the projections of all shared experts as one MLP. `None` = the device
    /// packs experts in a format that linear layers cannot read, and there is no separate MLP.
    pub(crate) fn shared_linears(&self) -> Option<Vec<[PackedLinear; 2]>> {
        let linear = |weight| PackedLinear::new(weight, None);
        if let Some(separate) = &self.separate_shared {
            return Some(vec![separate.clone()]);
        }
        let of = |i| Some([self.gate_up.matrix(i)?, self.down.matrix(i)?].map(linear));
        (self.len() - self.shared..self.len()).map(of).collect()
    }

    /// Number of experts on this rank.
    #[must_use]
    pub fn len(&self) -> usize {
        self.down.len()
    }

    /// Whether this rank has no experts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.down.is_empty()
    }

    /// Element type of the weights on the device.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.down.dtype()
    }

    fn on_rank(&self) -> Result<ExpertWeights<'_>, OpError> {
        let Self { gate_up, down, activation, .. } = self;
        let mut experts = ExpertWeights::unbiased(self.first, gate_up, down);
        experts.activation = *activation;
        if let Some(ExpertBiases { gate_up, down }) = &self.biases {
            (experts.gate_up_bias, experts.down_bias) = (Some(gate_up.mat()?), Some(down.mat()?));
        }
        Ok(experts)
    }

    /// Size of the weights on the device, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let separate =
            self.separate_shared.iter().flatten().map(PackedLinear::bytes).sum::<usize>();
        self.gate_up.bytes() + self.down.bytes() + separate
    }
}

impl Ops {
    /// Plans how shared experts are computed for `tokens` tokens. `gate_up`: gate-up projections of the
    /// shared experts as separate MLPs. `exchanges`: tokens are exchanged with other ranks between routing
    /// and the sum.
    pub(crate) fn plan_shared_experts<'a>(
        &self,
        tokens: usize,
        experts: &PackedExperts,
        gate_up: impl IntoIterator<Item = &'a PackedLinear>,
        exchanges: bool,
    ) -> SharedExpertPlan {
        let on_16_bit_gpu = self.device.gpu().is_some() && self.dtype() != DType::F32;
        let separate = gate_up.into_iter().map(PackedLinear::dtype);
        SharedExpertPlan::new(on_16_bit_gpu, tokens, experts.shared > 0, separate, exchanges)
    }

    /// Routes each token by `rule` to its top-k experts, best first, then to the fused shared experts.
    /// `logits` is f32 `[tokens, experts]`. `counter` counts the tokens that are routed to each expert.
    pub fn moe_route(
        &self,
        logits: &Tensor,
        per_token: ExpertsPerToken,
        rule: &RouterRule,
        counter: Option<LayerExpertLoadCounter<'_>>,
    ) -> Result<ExpertRouting, OpError> {
        let ExpertsPerToken { top_k, shared } = per_token;
        let shape = [logits.rows(), top_k + shared];
        let mut experts = self.scratch(DType::I32, &shape)?;
        let mut weights = self.scratch(DType::F32, &shape)?;
        let (s, logits) = (&self.stream, logits.mat()?);
        let (out, out_weights) = (experts.mat_mut()?, weights.mat_mut()?);
        LayerExpertLoadCounter::with(counter, |load| {
            if rule.is_plain() {
                let renormalise = rule.renormalise;
                let router = &SoftmaxRouterArgs { logits, top_k, renormalise, shared };
                let op = SoftmaxRouting { experts: out, weights: out_weights, router, load };
                return Ok(self.device.launch(s, op)?);
            }
            let rule = &rule.kernel_args(shared)?;
            let op = GroupedTopKRouting { experts: out, weights: out_weights, logits, rule, load };
            Ok(self.device.launch(s, op)?)
        })?;
        Ok(ExpertRouting { experts, weights })
    }

    /// Routes each token to its experts and computes their MLPs: [`Ops::moe_route`] and [`Ops::moe_mlp`],
    /// fused where the device supports it. `counter` counts the tokens that are routed to each expert.
    pub fn moe(
        &self,
        x: &Tensor,
        logits: &Tensor,
        per_token: ExpertsPerToken,
        rule: &RouterRule,
        experts: &PackedExperts,
        counter: Option<LayerExpertLoadCounter<'_>>,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let ExpertsPerToken { top_k, shared } = per_token;
        let renormalise = rule.renormalise;
        let router = SoftmaxRouterArgs { logits: logits.mat()?, top_k, renormalise, shared };
        let rank_experts = experts.on_rank()?;
        if rule.is_plain() && FusedMoe::supports(&self.device, &router, &rank_experts) {
            let mut y = self.scratch(x.dtype(), x.shape())?;
            let (s, out, x) = (&self.stream, y.mat_mut()?, x.mat()?);
            LayerExpertLoadCounter::with(counter, |load| {
                let op = FusedMoe { y: out, x, router: &router, experts: &rank_experts, load };
                Ok(self.device.launch(s, op)?)
            })?;
            return Ok(y);
        }
        self.moe_mlp(x, &self.moe_route(logits, per_token, rule, counter)?, experts)
    }

    /// Uploads the EPLB map `physical_experts`, row-major i32 `[experts, cols]`. The row of a logical expert
    /// has the number of its copies, then the index of the physical expert of each copy.
    pub fn upload_placement(
        &self,
        physical_experts: &[i32],
        cols: usize,
    ) -> Result<Tensor, OpError> {
        let mut tensor = self.zeros(DType::I32, &[physical_experts.len() / cols.max(1), cols])?;
        let bytes: Vec<u8> =
            physical_experts.iter().flat_map(|expert| expert.to_le_bytes()).collect();
        self.device.upload(tensor.buffer_mut()?, 0, &bytes)?;
        Ok(tensor)
    }

    /// Replaces the logical experts in `routing` by physical experts, as the EPLB map `physical_experts`
    /// states. If a logical expert has several copies, the position of the token selects one of them.
    /// `tokens` has the token index of each row of `routing` (`None` = row `t` belongs to token `t`);
    /// `positions` has the position of each token.
    pub fn eplb_map_experts(
        &self,
        routing: &mut ExpertRouting,
        positions: &Tensor,
        tokens: Option<&Tensor>,
        physical_experts: &Tensor,
    ) -> Result<(), OpError> {
        let (s, experts) = (&self.stream, routing.experts.mat_mut()?);
        let tokens = tokens.map(Tensor::mat).transpose()?;
        Ok(self.device.launch(
            s,
            ExpertPlacementLookup {
                experts,
                positions: positions.mat()?,
                tokens,
                placement: physical_experts.mat()?,
            },
        )?)
    }

    /// Expert MLPs: `y = Σ weight · down(activation(gate x, up x))` over the experts of a token that are on this
    /// rank, in ascending order, summed in f32. `x` and `y` are `[tokens, hidden_size]`.
    pub fn moe_mlp(
        &self,
        x: &Tensor,
        routing: &ExpertRouting,
        experts: &PackedExperts,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let mut y = self.scratch(x.dtype(), x.shape())?;
        let routes =
            TopKRoutes { experts: routing.experts.mat()?, weights: routing.weights.mat()? };
        let (s, out) = (&self.stream, y.mat_mut()?);
        self.device.launch(
            s,
            ExpertMlp { y: out, x: x.mat()?, routes: &routes, experts: &experts.on_rank()? },
        )?;
        Ok(y)
    }
}
