//! Linear layers split over the ranks of `f.tp`.

use super::{ResidualStream, RmsNormLayer};
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};
use ops::{GatedActivation, PackedLinear, Tensor};

/// Column-parallel linear layer `W x + b`: each rank has a part of the outputs; no communication.
#[derive(Debug)]
pub(crate) struct ColumnParallelLinear(PackedLinear);

/// Row-parallel linear layer `W x + b`: each rank has a part of the inputs; the products are all-reduced.
#[derive(Debug)]
pub(crate) struct RowParallelLinear(PackedLinear);

impl ColumnParallelLinear {
    /// Loads the projections `names`, stacked into one GEMM.
    pub(crate) fn load(
        w: &Weights<'_>,
        names: &[&str],
        bias: bool,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self(w.linear(names, bias)?))
    }

    /// `norm(x) Wᵀ + b`: from the stream `[T, inputs]` to `[T, outputs of this rank]`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
    ) -> Result<Tensor, ForwardError> {
        x.normed_linear(f, norm, &self.0)
    }

    /// `silu(gate) · up` of `norm(x) Wᵀ + b`, gate rows first, as the input of `down`: see
    /// [`GatedActivation`].
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

    /// Loads a layer that computes `factor W x + b`.
    pub(crate) fn load_scaled(
        w: &Weights<'_>,
        name: &str,
        bias: bool,
        factor: f32,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self(w.linear_scaled(name, bias, factor)?))
    }

    /// `x += W h + b`: `h [T, inputs of this rank]`; the stream `[T, outputs]` is equal on all ranks.
    pub(crate) fn add_to(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        h: &Tensor,
    ) -> Result<(), ForwardError> {
        x.add_linear(f, h, &self.0)
    }

    /// `x += W (silu(gate) · up) + b` with the activation `h` of this rank.
    pub(crate) fn add_gated_to(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        h: &GatedActivation,
    ) -> Result<(), ForwardError> {
        x.add_gated_linear(f, h, &self.0)
    }
}
