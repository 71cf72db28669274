//! Linear layers split over the ranks of `f.tp`.

use crate::{Forward, ForwardError, LoadError, Weights};
use ops::{PackedLinear, Tensor};

/// `W x + b` where each rank holds some of the outputs; nothing is exchanged.
#[derive(Debug)]
pub(crate) struct ColumnParallelLinear(PackedLinear);

/// `W x + b` where each rank holds some of the inputs; the products are summed over ranks.
#[derive(Debug)]
pub(crate) struct RowParallelLinear(PackedLinear);

impl ColumnParallelLinear {
    /// The projections `names`, stacked: one product instead of several.
    pub(crate) fn load(w: &Weights<'_>, names: &[&str], bias: bool) -> Result<Self, LoadError> {
        Ok(Self(w.linear(names, bias)?))
    }

    /// `[T, inputs]` to `[T, outputs of this rank]`.
    pub(crate) fn forward(&self, f: &Forward<'_>, x: &Tensor) -> Result<Tensor, ForwardError> {
        Ok(f.ops.linear(x, &self.0)?)
    }
}

impl RowParallelLinear {
    pub(crate) fn load(w: &Weights<'_>, name: &str, bias: bool) -> Result<Self, LoadError> {
        Ok(Self(w.linear(&[name], bias)?))
    }

    /// `[T, inputs of this rank]` to `[T, outputs]`, the same on all ranks.
    pub(crate) fn forward(&self, f: &Forward<'_>, x: &Tensor) -> Result<Tensor, ForwardError> {
        let mut y = f.ops.linear(x, &self.0)?;
        f.tp.all_reduce(f.ops.stream(), y.mat_mut()?)?;
        Ok(y)
    }
}
