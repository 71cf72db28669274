//! Linear layers split over the ranks of `f.tp`.

use super::{ResidualStream, RmsNorm};
use crate::{ForwardContext, ForwardError, ModelLoadError, Weights};
use ops::{PackedLinear, Tensor};

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

    /// Tells that `next` reads its weights behind this one's.
    pub(crate) fn prefetch_next(&mut self, next: &RowParallelLinear) {
        self.0.set_prefetch(&next.0, false);
    }

    /// `norm(x) Wᵀ + b`: the stream `[T, inputs]` to `[T, outputs of this rank]`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNorm,
    ) -> Result<Tensor, ForwardError> {
        x.normed_linear(f, norm, &self.0)
    }

    /// `silu(gate) · up` of the same, gate rows first: `[T, outputs of this rank / 2]`.
    pub(crate) fn forward_silu_mul(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNorm,
    ) -> Result<Tensor, ForwardError> {
        x.normed_silu_mul(f, norm, &self.0)
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

    /// Tells that `next`, gate and up in one if `gated`, reads its weights behind this one's.
    pub(crate) fn prefetch_next(&mut self, next: &ColumnParallelLinear, gated: bool) {
        self.0.set_prefetch(&next.0, gated);
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

    /// Whether `x += W (silu(gate) · up)` is less work than the two one by one.
    pub(crate) fn fuses_silu_mul(&self, f: &ForwardContext<'_>, rows: usize) -> bool {
        f.ops.fuses_prologue(rows, &self.0)
    }

    /// The same with `h = silu(gate) · up`: `halves [T, 2 inputs of this rank]`, gate columns first.
    pub(crate) fn add_gated_to(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        halves: &Tensor,
    ) -> Result<(), ForwardError> {
        x.add_silu_mul_linear(f, halves, &self.0)
    }
}
