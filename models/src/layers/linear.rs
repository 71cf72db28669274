//! Linear layers split over the ranks of `f.tp`.

use super::{ResidualStream, RmsNormLayer};
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};
use ops::{GatedActivation, PackedLinear, Tensor};

/// `W x + b` where each rank holds some of the outputs; nothing is exchanged.
#[derive(Debug)]
pub(crate) struct ColumnParallelLinear(PackedLinear);

/// `W x + b` where each rank holds some of the inputs; the products are summed over ranks.
#[derive(Debug)]
pub(crate) struct RowParallelLinear(PackedLinear);

impl ColumnParallelLinear {
    /// The projections `names`, stacked: one product instead of several.
    pub(crate) fn load(
        w: &Weights<'_>,
        names: &[&str],
        bias: bool,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self(w.linear(names, bias)?))
    }

    /// `norm(x) Wᵀ + b`: the stream `[T, inputs]` to `[T, outputs of this rank]`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
    ) -> Result<Tensor, ForwardError> {
        x.normed_linear(f, norm, &self.0)
    }

    /// `silu(gate) · up` of the same, gate rows first, as the input of `down`: `[T, outputs of this rank / 2]`.
    pub(crate) fn forward_gated(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        down: &RowParallelLinear,
    ) -> Result<GatedActivation, ForwardError> {
        x.normed_gated(f, norm, &self.0, &down.0)
    }
}

impl RowParallelLinear {
    pub(crate) fn load(w: &Weights<'_>, name: &str, bias: bool) -> Result<Self, ModelLoadError> {
        Self::load_scaled(w, name, bias, 1.0)
    }

    /// `factor W x + b`
    pub(crate) fn load_scaled(
        w: &Weights<'_>,
        name: &str,
        bias: bool,
        factor: f32,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self(w.linear_scaled(name, bias, factor)?))
    }

    /// `x += W h + b`: `h [T, inputs of this rank]`, the stream `[T, outputs]` is the same on all ranks.
    pub(crate) fn add_to(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        h: &Tensor,
    ) -> Result<(), ForwardError> {
        x.add_linear(f, h, &self.0)
    }

    /// `x += W (silu(gate) · up) + b`: `h [T, inputs of this rank]`.
    pub(crate) fn add_gated_to(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        h: &GatedActivation,
    ) -> Result<(), ForwardError> {
        x.add_gated_linear(f, h, &self.0)
    }
}
