//! Residual stream of a decoder. The output of attention or of an MLP is not added until the next norm, so
//! that one kernel adds it to the stream and normalises the sum. If the tensor-parallel group defers the
//! all-reduce, this kernel also computes the all-reduce.

use super::RmsNormLayer;
use crate::{ForwardContext, ForwardError};
use collectives::{AllReduceNormArgs, AllReduceState};
use ops::{DownProjectionInput, GatedMlpWeights, PackedLinear, Tensor};

/// Residual stream `[tokens, hidden size]`: the value is `x + pending`.
#[derive(Debug)]
pub(crate) struct ResidualStream {
    x: Tensor,
    pending: Option<PendingDelta>,
    /// Factor by which the stream is multiplied to obtain the hidden states that are passed to the probe
    /// (observer of intermediate results) and to the collector of auxiliary hidden states.
    scale: f32,
    /// Inputs of all layers, `[tokens, layers · channels]`; `None` if the model has none.
    layer_inputs: Option<Tensor>,
}

/// Output of attention or of an MLP that has not been added to the residual stream yet.
#[derive(Debug)]
struct PendingDelta {
    delta: Tensor,
    /// Whether `delta` is this rank's partial sum, which must still be all-reduced over the tensor-parallel
    /// ranks.
    partial: bool,
}

impl ResidualStream {
    pub(crate) fn new(x: Tensor) -> Self {
        Self::with_scale(x, 1.0)
    }

    /// Creates a stream whose hidden states are `scale · x`.
    pub(crate) fn with_scale(x: Tensor, scale: f32) -> Self {
        Self { x, pending: None, scale, layer_inputs: None }
    }

    /// Adds the inputs of all layers, `[tokens, layers · channels]`.
    pub(crate) fn with_layer_inputs(self, layer_inputs: Option<Tensor>) -> Self {
        Self { layer_inputs, ..self }
    }

    /// Inputs of all layers for the tokens of the stream, `[tokens, layers · channels]`.
    pub(crate) fn layer_inputs(&self) -> Option<&Tensor> {
        self.layer_inputs.as_ref()
    }

    /// Adds the pending delta (output of attention or of an MLP) to the stream and returns `norm(x)`, where
    /// `x` is the sum.
    pub(crate) fn normed(
        &mut self,
        f: &ForwardContext<'_>,
        norm: &RmsNormLayer,
    ) -> Result<Tensor, ForwardError> {
        let y = f.ops.scratch(self.x.dtype(), self.x.shape())?;
        self.normed_to(y, f, norm)
    }

    /// Adds the pending delta to the stream and returns `norm(x)` of the last layer: the hidden states of the model, in the
    /// memory of the caller if there is any.
    pub(crate) fn final_normed(
        &mut self,
        f: &ForwardContext<'_>,
        norm: &RmsNormLayer,
    ) -> Result<Tensor, ForwardError> {
        let y = f.output(self.x.dtype(), [self.x.rows(), self.x.cols()])?;
        self.normed_to(y, f, norm)
    }

    fn normed_to(
        &mut self,
        mut y: Tensor,
        f: &ForwardContext<'_>,
        norm: &RmsNormLayer,
    ) -> Result<Tensor, ForwardError> {
        let (weight, eps) = (&norm.weight, norm.eps);
        let Some(PendingDelta { delta, partial }) = self.pending.take() else {
            return Ok(f.ops.rms_norm_to(y, &self.x, weight, eps)?);
        };
        if !partial {
            return Ok(f.ops.add_rms_norm_to(y, &mut self.x, &delta, weight, eps)?);
        }
        let args = AllReduceNormArgs {
            y: y.mat_mut()?,
            x: self.x.mat_mut()?,
            delta: delta.mat()?,
            weight: weight.mat()?,
            eps,
        };
        f.tp.all_reduce_norm(f.ops.stream(), args)?;
        Ok(y)
    }

    /// Adds the pending delta (output of attention or of an MLP), which must already be all-reduced, to the
    /// stream and returns the sum.
    pub(crate) fn summed(&mut self, f: &ForwardContext<'_>) -> Result<&Tensor, ForwardError> {
        if let Some(PendingDelta { delta, .. }) = self.pending.take() {
            self.x = f.ops.add(&self.x, &delta)?;
        }
        Ok(&self.x)
    }

    /// Adds the pending delta (output of attention or of an MLP) to the stream and returns `norm(x) Wᵀ +
    /// bias`, where `x` is the sum; `x Wᵀ + bias` without a norm.
    pub(crate) fn normed_linear(
        &mut self,
        f: &ForwardContext<'_>,
        norm: Option<&RmsNormLayer>,
        w: &PackedLinear,
    ) -> Result<Tensor, ForwardError> {
        let Some(norm) = norm else { return Ok(f.ops.linear(self.summed(f)?, w)?) };
        let weight = norm.as_op();
        if self.pending.as_ref().is_some_and(|pending| pending.partial) {
            return Ok(f.ops.linear(&self.normed(f, norm)?, w)?);
        }
        Ok(match self.pending.take() {
            Some(PendingDelta { delta, .. }) => {
                f.ops.add_norm_linear(&mut self.x, &delta, weight, w)?
            }
            None => f.ops.norm_linear(&self.x, weight, w)?,
        })
    }

    /// Adds the pending delta (output of attention or of an MLP) to the stream and returns the input of the
    /// down projection of the gated MLP `mlp` over `norm(x)` (`x` without a norm), where `x` is the sum.
    pub(crate) fn normed_gated(
        &mut self,
        f: &ForwardContext<'_>,
        norm: Option<&RmsNormLayer>,
        mlp: GatedMlpWeights<'_>,
    ) -> Result<DownProjectionInput, ForwardError> {
        let Some(norm) = norm else {
            return Ok(f.ops.linear_gated(self.summed(f)?, mlp)?);
        };
        if self.pending.as_ref().is_some_and(|pending| pending.partial) {
            return Ok(f.ops.linear_gated(&self.normed(f, norm)?, mlp)?);
        }
        let (ops, weight) = (f.ops, norm.as_op());
        Ok(match self.pending.take() {
            Some(PendingDelta { delta, .. }) => {
                ops.add_norm_linear_gated(&mut self.x, &delta, weight, mlp)?
            }
            None => ops.norm_linear_gated(&self.x, weight, mlp)?,
        })
    }

    /// Computes `x += norm(h Wᵀ + bias)`, or `x += h Wᵀ + bias` without a norm; the products are summed over the
    /// tensor-parallel ranks.
    pub(crate) fn add_linear(
        &mut self,
        f: &ForwardContext<'_>,
        h: &Tensor,
        w: &PackedLinear,
        norm: Option<&RmsNormLayer>,
    ) -> Result<(), ForwardError> {
        debug_assert!(self.pending.is_none(), "a delta is pending");
        if let Some(norm) = norm {
            return self.add_normed(f, f.ops.linear(h, w)?, norm);
        }
        if f.tp.size() > 1 {
            return self.add_partial(f, f.ops.linear(h, w)?);
        }
        let delta = f.ops.linear_add(&mut self.x, h, w)?;
        delta.map_or(Ok(()), |delta| self.add_partial(f, delta))
    }

    /// Computes `x += norm(h Wᵀ + bias)`, or `x += h Wᵀ + bias` without a norm, for the input `h` of a down
    /// projection; the products are summed over the tensor-parallel ranks.
    pub(crate) fn add_gated_linear(
        &mut self,
        f: &ForwardContext<'_>,
        h: &DownProjectionInput,
        w: &PackedLinear,
        norm: Option<&RmsNormLayer>,
    ) -> Result<(), ForwardError> {
        debug_assert!(self.pending.is_none(), "a delta is pending");
        if let Some(norm) = norm {
            return self.add_normed(f, f.ops.gated_linear(h, w)?, norm);
        }
        if f.tp.size() > 1 {
            return self.add_partial(f, f.ops.gated_linear(h, w)?);
        }
        let delta = f.ops.gated_linear_add(&mut self.x, h, w)?;
        delta.map_or(Ok(()), |delta| self.add_partial(f, delta))
    }

    /// Computes `x += delta`, where `delta` is summed over the tensor-parallel ranks. The addition may be
    /// postponed until the next norm; the next norm must be computed before the next call of this function.
    /// If a probe reads intermediate results, `delta` is all-reduced immediately.
    pub(crate) fn add_partial(
        &mut self,
        f: &ForwardContext<'_>,
        mut delta: Tensor,
    ) -> Result<(), ForwardError> {
        debug_assert!(self.pending.is_none(), "a delta is pending");
        let (stream, sums) = (f.ops.stream(), delta.mat_mut()?);
        let partial = if f.probe.is_none() {
            f.tp.all_reduce_before_norm(stream, sums)? == AllReduceState::Deferred
        } else {
            f.tp.all_reduce(stream, sums)?;
            false
        };
        self.pending = Some(PendingDelta { delta, partial });
        Ok(())
    }

    /// Computes `x += norm(delta)`, where `delta` is summed over the tensor-parallel ranks before the norm. The
    /// addition is postponed until the next use of the stream.
    fn add_normed(
        &mut self,
        f: &ForwardContext<'_>,
        mut delta: Tensor,
        norm: &RmsNormLayer,
    ) -> Result<(), ForwardError> {
        f.tp.all_reduce(f.ops.stream(), delta.mat_mut()?)?;
        self.add_norm_of(f, &delta, norm)
    }

    /// Computes `x += delta` for a `delta` that is equal on all ranks. The addition is postponed until the next use of the
    /// stream.
    pub(crate) fn add_summed(&mut self, delta: Tensor) {
        debug_assert!(self.pending.is_none(), "a delta is pending");
        self.pending = Some(PendingDelta { delta, partial: false });
    }

    /// Computes `x += norm(delta)` for a `delta` that is equal on all ranks. The addition is postponed until the next
    /// use of the stream.
    pub(crate) fn add_norm_of(
        &mut self,
        f: &ForwardContext<'_>,
        delta: &Tensor,
        norm: &RmsNormLayer,
    ) -> Result<(), ForwardError> {
        self.add_summed(norm.of(f, delta)?);
        Ok(())
    }

    /// Adds the pending delta, which must already be all-reduced, to the stream, and multiplies the sum by `factor`.
    pub(crate) fn scale_by(
        &mut self,
        f: &ForwardContext<'_>,
        factor: f32,
    ) -> Result<(), ForwardError> {
        self.summed(f)?;
        Ok(f.ops.scale(&mut self.x, factor)?)
    }

    /// Removes all rows of the residual stream except those whose indices are in `rows`, i32 `[rows]`.
    pub(crate) fn retain_rows(
        &mut self,
        f: &ForwardContext<'_>,
        rows: &Tensor,
    ) -> Result<(), ForwardError> {
        debug_assert!(self.pending.is_none(), "the pending delta has all rows");
        self.x = f.ops.gather_rows(&self.x, rows)?;
        if let Some(inputs) = &self.layer_inputs {
            self.layer_inputs = Some(f.ops.gather_rows(inputs, rows)?);
        }
        Ok(())
    }

    /// Passes the input of layer `layer` to the collector of auxiliary hidden states, if this input is an
    /// auxiliary hidden state.
    pub(crate) fn collect_aux_state(
        &mut self,
        f: &ForwardContext<'_>,
        layer: usize,
    ) -> Result<(), ForwardError> {
        let Some(aux) = f.aux_hidden_states.filter(|aux| aux.collects_layer(layer)) else {
            return Ok(());
        };
        if let Some(PendingDelta { delta, partial }) = &mut self.pending
            && std::mem::take(partial)
        {
            f.tp.all_reduce(f.ops.stream(), delta.mat_mut()?)?;
        }
        match self.hidden_states(f)? {
            Some(hidden) => aux.collect(f, layer, &hidden),
            None => aux.collect(f, layer, &self.x),
        }
    }

    /// Returns the hidden states `scale · (x + pending)`; `None` if they equal `x`. A pending delta (output
    /// of attention or of an MLP) must already be all-reduced.
    fn hidden_states(&self, f: &ForwardContext<'_>) -> Result<Option<Tensor>, ForwardError> {
        let (mut hidden, scale) = match &self.pending {
            Some(PendingDelta { delta, .. }) => (f.ops.add(&self.x, delta)?, self.scale),
            None if self.scale.to_bits() == 1f32.to_bits() => return Ok(None),
            // `x + x` serves as a copy of `x` that is multiplied by 2; halving the scale compensates this
            // exactly.
            None => (f.ops.add(&self.x, &self.x)?, self.scale / 2.0),
        };
        f.ops.scale(&mut hidden, scale)?;
        Ok(Some(hidden))
    }

    /// Returns the stream `[tokens, hidden size]`. The preceding operation must have been a norm, so that no
    /// output of attention or of an MLP remains to be added.
    pub(crate) fn into_stream(self) -> Tensor {
        debug_assert!(self.pending.is_none(), "a delta is pending");
        self.x
    }

    /// Passes the hidden states after layer `layer` to the probe (observer of intermediate results), if there
    /// is a probe.
    pub(crate) fn probe_layer(
        &self,
        f: &ForwardContext<'_>,
        layer: usize,
    ) -> Result<(), ForwardError> {
        let Some(probe) = f.probe else { return Ok(()) };
        match self.hidden_states(f)? {
            Some(hidden) => probe.hidden(f.ops, layer, &hidden)?,
            None => probe.hidden(f.ops, layer, &self.x)?,
        }
        Ok(())
    }
}
