//! Tensor-parallel linear layers, split over the ranks of `f.tp`, the tensor-parallel group.

use super::{ResidualStream, RmsNormLayer};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{DownProjectionInput, GateActivation, GatedMlpWeights, PackedLinear, Tensor};

/// Column-parallel linear layer `W x + b`: each rank computes a part of the output channels, without
/// communication.
#[derive(Debug)]
pub(crate) struct ColumnParallelLinear(PackedLinear);

/// Row-parallel linear layer `W x + b`: each rank has a part of the input channels; the partial products are
/// all-reduced.
#[derive(Debug)]
pub(crate) struct RowParallelLinear(PackedLinear);

impl ColumnParallelLinear {
    /// Loads the projections `names` with their rows stacked, so that one GEMM computes all of them.
    pub(crate) fn load(
        w: &Weights<'_>,
        names: &[&str],
        bias: bool,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self(w.linear(names, bias)?))
    }

    /// Loads the query, key and value projections of GQA with their rows stacked, for a layer with the sizes of
    /// `config`. If the model has output gates, their projections follow.
    pub(crate) fn load_qkv(w: &Weights<'_>, config: &ModelConfig) -> Result<Self, ModelLoadError> {
        if config.has_output_gate() {
            return Ok(Self(w.gated_qkv_linear(config.head_dim)?));
        }
        Ok(Self(w.qkv_linear(config)?))
    }

    /// Computes `norm(x) Wᵀ + b`, or `x Wᵀ + b` without a norm: from the residual stream `[tokens, inputs]` to
    /// `[tokens, outputs of this rank]`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: Option<&RmsNormLayer>,
    ) -> Result<Tensor, ForwardError> {
        x.normed_linear(f, norm, &self.0)
    }

    /// Computes the activation of gate and up, which are the first and the second half of the output channels
    /// of `norm(x) Wᵀ + b`. The result is the input of the layer `down`, in the form that
    /// [`DownProjectionInput`] describes.
    pub(crate) fn forward_gated(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: Option<&RmsNormLayer>,
        down: &RowParallelLinear,
        activation: GateActivation,
    ) -> Result<DownProjectionInput, ForwardError> {
        x.normed_gated(f, norm, GatedMlpWeights { gate_up: &self.0, down: &down.0, activation })
    }
}

impl RowParallelLinear {
    pub(crate) fn load(w: &Weights<'_>, name: &str, bias: bool) -> Result<Self, ModelLoadError> {
        Self::load_scaled(w, name, bias, &[1.0])
    }

    /// Loads a layer that computes `W (factors · x) + b`, where each factor multiplies an equally long range of
    /// input channels.
    pub(crate) fn load_scaled(
        w: &Weights<'_>,
        name: &str,
        bias: bool,
        factors: &[f32],
    ) -> Result<Self, ModelLoadError> {
        Ok(Self(w.linear_scaled(name, bias, factors)?))
    }

    /// Computes `x += norm(W h + b)`, or `x += W h + b` without a norm, where `h [tokens, inputs of this rank]` is
    /// the input. The residual stream `x [tokens, outputs]` is equal on all ranks.
    pub(crate) fn add_to(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        h: &Tensor,
        norm: Option<&RmsNormLayer>,
    ) -> Result<(), ForwardError> {
        x.add_linear(f, h, &self.0, norm)
    }

    /// Computes `W h + b`, `[tokens, outputs]`, summed over the ranks, where `h` is this rank's output of
    /// `forward_gated`.
    pub(crate) fn gated_output(
        &self,
        f: &ForwardContext<'_>,
        h: &DownProjectionInput,
    ) -> Result<Tensor, ForwardError> {
        let mut y = f.ops.gated_linear(h, &self.0)?;
        f.tp.all_reduce(f.ops.stream(), y.mat_mut()?)?;
        Ok(y)
    }

    /// Computes `x += norm(W h + b)`, or `x += W h + b` without a norm, where `h` is this rank's output of
    /// `forward_gated`.
    pub(crate) fn add_gated_to(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        h: &DownProjectionInput,
        norm: Option<&RmsNormLayer>,
    ) -> Result<(), ForwardError> {
        x.add_gated_linear(f, h, &self.0, norm)
    }
}
