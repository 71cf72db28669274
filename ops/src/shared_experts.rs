//! Shared experts of a mixture of experts: fused with the routed experts, overlapped with them, or after them.

use kernels::GateActivation;

use crate::launch_plan::SharedExpertPlan;
use crate::{OpError, Ops, PackedExperts, PackedLinear, Tensor};

/// Shared expert as a gated MLP with SiLU: one expert, or several experts combined into one MLP.
#[derive(Debug)]
pub struct SharedExpertMlp {
    /// Gate and up projection `[2 · intermediate_size, hidden_size]`, gate rows first.
    pub gate_up: PackedLinear,
    /// Down projection `[hidden_size, intermediate_size]`.
    pub down: PackedLinear,
}

/// Shared experts of one layer. The default has no experts.
#[derive(Debug, Default)]
pub struct SharedExperts {
    /// Shared experts as separate MLPs, used in steps in which fused shared experts would be slower.
    pub mlps: Vec<SharedExpertMlp>,
    /// Gate `[1, hidden_size]`: the output of the shared experts is multiplied by `sigmoid(gate h)`.
    pub gate: Option<PackedLinear>,
}

impl SharedExperts {
    /// Returns the shared experts that are packed with the routed experts `experts`, as separate MLPs without
    /// a gate.
    #[must_use]
    pub fn from_packed(experts: &PackedExperts) -> Self {
        let linears = experts.shared_linears().unwrap_or_default();
        let mlp = |[gate_up, down]: [PackedLinear; 2]| SharedExpertMlp { gate_up, down };
        Self { mlps: linears.into_iter().map(mlp).collect(), gate: None }
    }

    fn plan(
        &self,
        ops: &Ops,
        tokens: usize,
        experts: &PackedExperts,
        exchanges: bool,
    ) -> SharedExpertPlan {
        if self.mlps.is_empty() {
            return SharedExpertPlan::Fused;
        }
        let gate_up = self.mlps.iter().map(|mlp| &mlp.gate_up);
        ops.plan_shared_experts(tokens, experts, gate_up, exchanges)
    }
}

impl Ops {
    /// Returns `routed(h) + shared(h)` for `h [tokens, hidden_size]`; the result has the shape of `h`. `routed`
    /// computes the routed experts of `experts` and the number of fused shared experts that it receives.
    /// `exchanges`: tokens are exchanged with other ranks in `routed`.
    ///
    /// Errors: those of `routed`; `OpError` if shapes do not match or a launch fails.
    pub fn with_shared_experts<E: From<OpError>>(
        &self,
        h: &Tensor,
        experts: &PackedExperts,
        shared: &SharedExperts,
        exchanges: bool,
        routed: impl FnOnce(usize) -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let plan = shared.plan(self, h.rows(), experts, exchanges);
        if plan == SharedExpertPlan::Fused {
            return routed(experts.shared());
        }
        let overlaps = plan == SharedExpertPlan::SecondaryStream;
        let secondary = overlaps.then(|| self.secondary_stream()).transpose()?;
        let y = routed(0)?;
        let ops = secondary.as_ref().map_or(self, |stream| stream.ops());
        let outputs = shared.mlps.iter().map(|mlp| ops.shared_expert_mlp(h, mlp));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        if let Some(secondary) = secondary {
            secondary.join(self)?;
        }
        Ok(self.add_shared_outputs(y, h, &outputs, shared.gate.as_ref())?)
    }

    fn shared_expert_mlp(&self, h: &Tensor, mlp: &SharedExpertMlp) -> Result<Tensor, OpError> {
        let inner = self.linear_activation(h, &mlp.gate_up, GateActivation::Silu)?; // [tokens, intermediate_size]
        self.linear(&inner, &mlp.down)
    }

    /// Returns `y + Σ output`, or `y + Σ sigmoid(gate h) · output` with a gate.
    fn add_shared_outputs(
        &self,
        mut y: Tensor,
        h: &Tensor,
        outputs: &[Tensor],
        gate: Option<&PackedLinear>,
    ) -> Result<Tensor, OpError> {
        let gate = gate.map(|gate| self.linear_f32(h, gate)).transpose()?; // [tokens, 1]
        for output in outputs {
            match &gate {
                Some(gate) => self.add_gated(&mut y, output, gate)?,
                None => y = self.add(&y, output)?,
            }
        }
        Ok(y)
    }
}
