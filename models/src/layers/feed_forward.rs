//! What a layer of a family with experts has after its attention.

use super::{GatedMlp, MoeMlp, ResidualStream, RmsNormLayer};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// `x += mlp(norm(x))`, by the layer's number.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(GatedMlp),
    Sparse(Box<MoeMlp>),
}

impl FeedForward {
    /// Of layer `i`.
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

    /// The stream is of the tokens `asked`, i32 `[T]`, or of all.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        match self {
            Self::Dense(mlp) => mlp.forward(f, x, norm),
            Self::Sparse(mlp) => mlp.forward(f, x, norm, asked),
        }
    }
}
