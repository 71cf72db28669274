//! Dense gated MLP, used by all supported model families.

use super::{
    ColumnParallelLinear, ResidualStream, RmsNormLayer, RowParallelLinear, SublayerNormRefs,
};
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};
use ops::{DownProjectionInput, GateActivation, Tensor};

/// Dense MLP of a decoder layer: `x += down_proj(activation(gate_proj h, up_proj h))` with `h =
/// norm(x)`.
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_up_proj: ColumnParallelLinear,
    down_proj: RowParallelLinear,
    activation: GateActivation,
}

impl GatedMlp {
    pub(crate) fn load(
        w: &Weights<'_>,
        bias: bool,
        activation: GateActivation,
    ) -> Result<Self, ModelLoadError> {
        let gate_up_proj = ColumnParallelLinear::load(w, &["gate_proj", "up_proj"], bias)?;
        let down_proj = RowParallelLinear::load(w, "down_proj", bias)?;
        Ok(Self { gate_up_proj, down_proj, activation })
    }

    pub(crate) fn forward<'a>(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norms: impl Into<SublayerNormRefs<'a>>,
    ) -> Result<(), ForwardError> {
        let norms = norms.into();
        let h = self.activated(f, x, norms.input)?;
        self.down_proj.add_gated_to(f, x, &h, norms.output) // [tokens, hidden size]; all-reduced over f.tp
    }

    /// Returns the output of the MLP, `[tokens, hidden size]`, summed over the ranks of `f.tp`, without adding it to the
    /// residual stream.
    pub(crate) fn output(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: Option<&RmsNormLayer>,
    ) -> Result<Tensor, ForwardError> {
        let h = self.activated(f, x, norm)?;
        self.down_proj.gated_output(f, &h)
    }

    /// Returns the input of the down projection.
    fn activated(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: Option<&RmsNormLayer>,
    ) -> Result<DownProjectionInput, ForwardError> {
        let Self { gate_up_proj, down_proj, activation } = self;
        gate_up_proj.forward_gated(f, x, norm, down_proj, *activation)
    }
}
