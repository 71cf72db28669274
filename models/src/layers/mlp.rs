//! Dense MLP of all supported families.

use super::{ColumnParallelLinear, ResidualStream, RmsNormLayer, RowParallelLinear};
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};

/// `x += down_proj(silu(gate h) · up h)` with `h = norm(x)`.
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_up_proj: ColumnParallelLinear,
    down_proj: RowParallelLinear,
}

impl GatedMlp {
    pub(crate) fn load(w: &Weights<'_>, bias: bool) -> Result<Self, ModelLoadError> {
        let gate_up_proj = ColumnParallelLinear::load(w, &["gate_proj", "up_proj"], bias)?;
        let down_proj = RowParallelLinear::load(w, "down_proj", bias)?;
        Ok(Self { gate_up_proj, down_proj })
    }

    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
    ) -> Result<(), ForwardError> {
        // [T, I], or [T, 2 I] for `GatedActivation::GateUp`.
        let h = self.gate_up_proj.forward_gated(f, x, norm, &self.down_proj)?;
        self.down_proj.add_gated_to(f, x, &h) // [T, H]; all-reduced over f.tp
    }
}
