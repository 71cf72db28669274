//! The residual stream of a decoder: sums are left pending until the next norm, which adds and
//! normalises in one pass.

use super::RmsNorm;
use crate::{Forward, ForwardError};
use ops::Tensor;

/// `x + pending`, `[T, H]`.
#[derive(Debug)]
pub(crate) struct Residual {
    x: Tensor,
    pending: Option<Tensor>,
}

impl Residual {
    pub(crate) fn new(x: Tensor) -> Self {
        Self { x, pending: None }
    }

    /// `x += delta`; every delta is followed by a norm before the next.
    pub(crate) fn add(&mut self, delta: Tensor) {
        debug_assert!(self.pending.is_none(), "two sums without a norm between them");
        self.pending = Some(delta);
    }

    /// `norm(x)`, leaving `x` as the stream.
    pub(crate) fn normed(
        &mut self,
        f: &Forward<'_>,
        norm: &RmsNorm,
    ) -> Result<Tensor, ForwardError> {
        let (weight, eps) = (&norm.weight, norm.eps);
        Ok(match self.pending.take() {
            Some(delta) => f.ops.add_rms_norm(&mut self.x, &delta, weight, eps)?,
            None => f.ops.rms_norm(&self.x, weight, eps)?,
        })
    }

    /// Shows the stream after layer `layer` to whoever watches.
    pub(crate) fn show(&self, f: &Forward<'_>, layer: usize) -> Result<(), ForwardError> {
        let Some(probe) = f.probe else { return Ok(()) };
        match &self.pending {
            Some(delta) => probe.hidden(f.ops, layer, &f.ops.add(&self.x, delta)?)?,
            None => probe.hidden(f.ops, layer, &self.x)?,
        }
        Ok(())
    }
}
