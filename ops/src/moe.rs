//! Mixture of experts: T tokens, E experts, k choices a token.

use kernels::{DType, Experts, HostMat, Packed, Routes};

use crate::error::check_size;
use crate::{OpError, Ops, Tensor};

/// Which experts each token goes to.
#[derive(Debug)]
pub struct Routing {
    /// i32 `[T, k]`, best first.
    pub experts: Tensor,
    /// f32 `[T, k]`.
    pub weights: Tensor,
}

/// The experts of one layer on this rank, packed.
#[derive(Debug, Default)]
pub struct PackedExperts {
    first: usize,
    gate_up: Vec<Packed>,
    down: Vec<Packed>,
}

impl PackedExperts {
    /// No expert yet; `first` is the global number of the first one pushed.
    #[must_use]
    pub fn starting_at(first: usize) -> Self {
        Self { first, ..Self::default() }
    }

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

    /// Bytes of the weights on the device.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.gate_up.iter().chain(&self.down).map(Packed::bytes).sum()
    }
}

impl Ops {
    /// Packs the next expert: `gate_up` parts stack to `[2 I, H]`, gate rows first; `down [H, I]`.
    pub fn push_expert(
        &self,
        experts: &mut PackedExperts,
        gate_up: &[HostMat<'_>],
        down: &HostMat<'_>,
    ) -> Result<(), OpError> {
        let gate_up = self.device.pack(gate_up, self.dtype())?;
        let down = self.device.pack(&[*down], self.dtype())?;
        check_size("push_expert", "outputs of gate_up", gate_up.n(), 2 * down.k())?;
        check_size("push_expert", "outputs of down", down.n(), gate_up.k())?;
        experts.gate_up.push(gate_up);
        experts.down.push(down);
        Ok(())
    }

    /// Softmax over the router's `logits` f32 `[T, E]`, then the `k` largest, the lower index first
    /// among equals; with `normalise` each token's weights are divided by their sum.
    pub fn moe_route_softmax(
        &self,
        logits: &Tensor,
        k: usize,
        normalise: bool,
    ) -> Result<Routing, OpError> {
        let mut experts = self.scratch(DType::I32, &[logits.rows(), k])?;
        let mut weights = self.scratch(DType::F32, &[logits.rows(), k])?;
        let (s, logits) = (&self.stream, logits.mat()?);
        let (out, out_weights) = (experts.mat_mut()?, weights.mat_mut()?);
        self.device.moe_route_softmax(s, out, out_weights, logits, normalise)?;
        Ok(Routing { experts, weights })
    }

    /// `y = Σ weight · down(silu(gate x) · up x)` over a token's experts on this rank in ascending
    /// order, summed in f32, rounded once: `x`, `y [T, H]`.
    pub fn moe_mlp(
        &self,
        x: &Tensor,
        routing: &Routing,
        experts: &PackedExperts,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), x.shape())?;
        let routes = Routes { experts: routing.experts.mat()?, weights: routing.weights.mat()? };
        let on_rank =
            Experts { first: experts.first, gate_up: &experts.gate_up, down: &experts.down };
        self.device.moe_mlp(&self.stream, y.mat_mut()?, x.mat()?, &routes, &on_rank)?;
        Ok(y)
    }
}
