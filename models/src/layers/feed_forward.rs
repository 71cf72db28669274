//! Feed-forward part of a decoder layer, in model families with experts.

use super::{GatedMlp, MoeMlp, ResidualStream, RmsNormLayer};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Feed-forward part `x += mlp(norm(x))` of a decoder layer: a dense MLP or a mixture of experts.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(GatedMlp),
    Sparse(Box<MoeMlp>),
}

impl FeedForward {
    /// Loads the feed-forward part of layer `i`; the configuration selects a dense MLP or experts.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        Ok(match config.moe_at(i) {
            Some(moe) => Self::Sparse(Box::new(MoeMlp::load(moe, w, i)?)),
            None => Self::Dense(GatedMlp::load(w, false)?),
        })
    }

    /// Updates the residual stream, which contains the tokens `logits_indices`, i32 `[rows]`, or all tokens
    /// if `None`.
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
