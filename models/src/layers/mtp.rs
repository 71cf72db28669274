//! A layer behind the last one that predicts one token more (DeepSeek-V3, arXiv 2412.19437, section 2.2).

use super::{DecoderLayer, ResidualStream, RmsNorm, RotaryEmbedding};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{PackedLinear, Tensor};

/// `norm(layer(W [norm_e(e); norm_h(h)]))` of a token's embedding `e` and the hidden state `h` of the token before it, both
/// `[T, H]`. The head makes of it the logits of the token behind.
#[derive(Debug)]
pub(crate) struct MtpModule<L> {
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    /// The columns of `W` that meet the embedding, and those that meet the hidden state.
    eh_proj: Vec<PackedLinear>,
    layer: L,
    norm: RmsNorm,
}

impl<L: DecoderLayer> MtpModule<L> {
    /// Layer `i`, whose weights are under `w`.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self {
            embedding_norm: RmsNorm::load(&w.at("enorm"), config.rms_eps)?,
            hidden_norm: RmsNorm::load(&w.at("hnorm"), config.rms_eps)?,
            eh_proj: w.linear_stacked(&["eh_proj"], 2)?,
            layer: L::load(config, w, rope, i)?,
            norm: RmsNorm::load(&w.at("shared_head.norm"), config.rms_eps)?,
        })
    }

    /// Hidden states `[T, H]` for the head, and for the next token's draft.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        embedding: &Tensor,
        before: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let mut x = self.project_inputs(f, embedding, before)?;
        self.layer.forward(f, &mut x, None)?;
        x.normed(f, &self.norm)
    }

    /// Keeps what drafts of later tokens attend to.
    pub(crate) fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        embedding: &Tensor,
        before: &Tensor,
    ) -> Result<(), ForwardError> {
        self.layer.write_kv_only(f, &mut self.project_inputs(f, embedding, before)?)
    }

    fn project_inputs(
        &self,
        f: &ForwardContext<'_>,
        embedding: &Tensor,
        before: &Tensor,
    ) -> Result<ResidualStream, ForwardError> {
        let part = |x: &Tensor, norm: &RmsNorm, w: &PackedLinear| {
            f.ops.linear(&f.ops.rms_norm(x, &norm.weight, norm.eps)?, w)
        };
        let embedding = part(embedding, &self.embedding_norm, &self.eh_proj[0])?;
        let hidden = part(before, &self.hidden_norm, &self.eh_proj[1])?;
        Ok(ResidualStream::new(f.ops.add(&embedding, &hidden)?))
    }
}
