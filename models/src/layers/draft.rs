//! A layer behind the last one that predicts one token more (DeepSeek-V3, arXiv 2412.19437, section 2.2).

use super::{DecoderLayer, Residual, RmsNorm, Rope};
use crate::{Config, Forward, ForwardError, LoadError, Weights};
use ops::{PackedLinear, Tensor};

/// `norm(layer(W [norm_e(e); norm_h(h)]))` of a token's embedding `e` and the hidden state `h` of the token before it, both
/// `[T, H]`. The head makes of it the logits of the token behind.
#[derive(Debug)]
pub(crate) struct DraftLayer<L> {
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    /// The columns of `W` that meet the embedding, and those that meet the hidden state.
    join: Vec<PackedLinear>,
    layer: L,
    norm: RmsNorm,
}

impl<L: DecoderLayer> DraftLayer<L> {
    /// Layer `i`, whose weights are under `w`.
    pub(crate) fn load(
        config: &Config,
        w: &Weights<'_>,
        rope: &Rope,
        i: usize,
    ) -> Result<Self, LoadError> {
        Ok(Self {
            embedding_norm: RmsNorm::load(&w.at("enorm"), config.rms_eps)?,
            hidden_norm: RmsNorm::load(&w.at("hnorm"), config.rms_eps)?,
            join: w.linear_parts(&["eh_proj"], 2)?,
            layer: L::load(config, w, rope, i)?,
            norm: RmsNorm::load(&w.at("shared_head.norm"), config.rms_eps)?,
        })
    }

    /// Hidden states `[T, H]` for the head, and for the next token's draft.
    pub(crate) fn forward(
        &self,
        f: &Forward<'_>,
        embedding: &Tensor,
        before: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let mut x = self.joined(f, embedding, before)?;
        self.layer.forward(f, &mut x, None)?;
        x.normed(f, &self.norm)
    }

    /// Keeps what drafts of later tokens attend to.
    pub(crate) fn keep(
        &self,
        f: &Forward<'_>,
        embedding: &Tensor,
        before: &Tensor,
    ) -> Result<(), ForwardError> {
        self.layer.keep(f, &mut self.joined(f, embedding, before)?)
    }

    fn joined(
        &self,
        f: &Forward<'_>,
        embedding: &Tensor,
        before: &Tensor,
    ) -> Result<Residual, ForwardError> {
        let part = |x: &Tensor, norm: &RmsNorm, w: &PackedLinear| {
            f.ops.linear(&f.ops.rms_norm(x, &norm.weight, norm.eps)?, w)
        };
        let embedding = part(embedding, &self.embedding_norm, &self.join[0])?;
        let hidden = part(before, &self.hidden_norm, &self.join[1])?;
        Ok(Residual::new(f.ops.add(&embedding, &hidden)?))
    }
}
