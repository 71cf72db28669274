//! The dense MLP of every supported family.

use super::{ColumnParallelLinear, RowParallelLinear};
use crate::{Forward, ForwardError, LoadError, Weights};
use ops::Tensor;

/// `down(silu(gate x) · up x)`
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl GatedMlp {
    pub(crate) fn load(w: &Weights<'_>, bias: bool) -> Result<Self, LoadError> {
        let gate_up = ColumnParallelLinear::load(w, &["gate_proj", "up_proj"], bias)?;
        Ok(Self { gate_up, down: RowParallelLinear::load(w, "down_proj", bias)? })
    }

    pub(crate) fn forward(&self, f: &Forward<'_>, x: &Tensor) -> Result<Tensor, ForwardError> {
        let gate_up = self.gate_up.forward(f, x)?; // [T, 2 I]
        let y = f.ops.silu_mul(&gate_up)?; // [T, I]
        self.down.forward(f, &y) // [T, H]; all-reduced over f.tp
    }
}
