//! The dense MLP of every supported family.

use super::{ColumnParallelLinear, GqaAttention, ResidualStream, RmsNorm, RowParallelLinear};
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};

/// `x += down(silu(gate h) · up h)` with `h = norm(x)`.
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl GatedMlp {
    pub(crate) fn load(w: &Weights<'_>, bias: bool) -> Result<Self, ModelLoadError> {
        let mut gate_up = ColumnParallelLinear::load(w, &["gate_proj", "up_proj"], bias)?;
        let down = RowParallelLinear::load(w, "down_proj", bias)?;
        gate_up.prefetch_next(&down);
        Ok(Self { gate_up, down })
    }

    /// Tells what reads its weights behind those of this one.
    pub(crate) fn prefetch_next(&mut self, next: &GqaAttention) {
        self.down.prefetch_next(next.first_linear(), false);
    }

    /// What reads its weights first.
    pub(crate) fn first_linear(&self) -> &ColumnParallelLinear {
        &self.gate_up
    }

    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNorm,
    ) -> Result<(), ForwardError> {
        let h = self.gate_up.forward_gated(f, x, norm, &self.down)?; // [T, I]
        self.down.add_gated_to(f, x, &h) // [T, H]; all-reduced over f.tp
    }
}
