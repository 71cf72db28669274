//! MLP of a decoder layer (dense or mixture of experts), in model families with experts.

use super::{GatedMlp, MoeMlp, ResidualStream, RmsNormLayer};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{GateActivation, Tensor};

/// MLP of a decoder layer, `x += mlp(norm(x))`: a dense MLP or a mixture of experts.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(GatedMlp),
    Sparse(Box<MoeMlp>),
}

impl FeedForward {
    /// Loads the MLP of layer `i`; the configuration selects a dense MLP or a mixture of experts.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        Ok(match config.moe_at(i) {
            Some(moe) => Self::Sparse(Box::new(MoeMlp::load(moe, w, i)?)),
            None => Self::Dense(GatedMlp::load(w, false, GateActivation::Silu)?),
        })
    }

    /// Updates the residual stream `x`, which contains the tokens with the indices `logits_indices`, i32
    /// `[rows]`, or all tokens if `logits_indices` is `None`.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        match self {
            Self::Dense(mlp) => mlp.forward(f, x, norm),
            Self::Sparse(mlp) => mlp.forward(f, x, norm, logits_indices),
        }
    }
}
