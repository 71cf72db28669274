//! Dense MLP of all supported families.

use super::{ColumnParallelLinear, ResidualStream, RmsNormLayer, RowParallelLinear};
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};

/// `x += down(silu(gate h) · up h)` with `h = norm(x)`.
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl GatedMlp {
    pub(crate) fn load(w: &Weights<'_>, bias: bool) -> Result<Self, ModelLoadError> {
        let gate_up = ColumnParallelLinear::load(w, &["gate_proj", "up_proj"], bias)?;
        let down = RowParallelLinear::load(w, "down_proj", bias)?;
        Ok(Self { gate_up, down })
    }

    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
    ) -> Result<(), ForwardError> {
        let h = self.gate_up.forward_gated(f, x, norm, &self.down)?; // [T, I] or [T, 2 I], see `GatedActivation`
        self.down.add_gated_to(f, x, &h) // [T, H]; all-reduced over f.tp
    }
}
