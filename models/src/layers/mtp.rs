//! Multi-token prediction (MTP, NextN) module: a decoder layer after the last layer of the model. It predicts
//! one draft token, which follows the token that the model predicts (DeepSeek-V3, arXiv 2412.19437, section
//! 2.2).

use std::sync::Arc;

use super::{DecoderLayer, ResidualStream, RmsNormLayer, RotaryEmbedding, VocabParallelEmbedding};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, MtpModel, Weights};
use ops::{PackedLinear, Tensor};

/// MTP module: computes `norm(layer(W [embedding_norm(e); hidden_norm(h)]))`, where `e` is the embedding of a
/// token and `h` the hidden state of the preceding token, both `[tokens, hidden size]`. From the result, the
/// LM head computes the logits of the next token.
#[derive(Debug)]
pub(crate) struct MtpModule<L> {
    embed: Arc<VocabParallelEmbedding>,
    embedding_norm: RmsNormLayer,
    hidden_norm: RmsNormLayer,
    /// Column blocks of the projection `W`: first the block that multiplies the embedding, then the block
    /// that multiplies the hidden state.
    eh_proj: Vec<PackedLinear>,
    layer: L,
    norm: RmsNormLayer,
}

impl<L: DecoderLayer> MtpModule<L> {
    /// Loads the MTP module that checkpoints store as layer `i`. Weight names in `w` are relative to the name
    /// prefix of this layer.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
        embed: Arc<VocabParallelEmbedding>,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self {
            embed,
            embedding_norm: RmsNormLayer::load(&w.at("enorm"), config.rms_eps)?,
            hidden_norm: RmsNormLayer::load(&w.at("hnorm"), config.rms_eps)?,
            eh_proj: w.linear_stacked(&["eh_proj"], 2)?,
            layer: L::load(config, w, rope, i)?,
            norm: RmsNormLayer::load(&w.at("shared_head.norm"), config.rms_eps)?,
        })
    }

    fn project_inputs(
        &self,
        f: &ForwardContext<'_>,
        embedding: &Tensor,
        previous: &Tensor,
    ) -> Result<ResidualStream, ForwardError> {
        let part = |x: &Tensor, norm: &RmsNormLayer, w: &PackedLinear| {
            f.ops.linear(&f.ops.rms_norm(x, &norm.weight, norm.eps)?, w)
        };
        let embedding = part(embedding, &self.embedding_norm, &self.eh_proj[0])?;
        let hidden = part(previous, &self.hidden_norm, &self.eh_proj[1])?;
        Ok(ResidualStream::new(f.ops.add(&embedding, &hidden)?))
    }
}

impl<L: DecoderLayer + Send> MtpModel for MtpModule<L> {
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let mut x = self.project_inputs(f, &self.embed.forward(f, ids)?, previous)?;
        self.layer.forward(f, &mut x, None)?;
        x.normed(f, &self.norm)
    }

    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        ids: &Tensor,
        previous: &Tensor,
    ) -> Result<(), ForwardError> {
        let mut x = self.project_inputs(f, &self.embed.forward(f, ids)?, previous)?;
        self.layer.write_kv_only(f, &mut x)
    }
}
