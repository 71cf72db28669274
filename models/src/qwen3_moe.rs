//! Qwen3 with experts (`Qwen3MoeForCausalLM`), after transformers `modeling_qwen3_moe.py`.
//!
//! Qwen3 whose MLP is a mixture of experts in the layers that the configuration names; the router's
//! sums and softmax are f32 in every dtype. Goldens: `tests/data/golden/qwen3_moe-*`.
//! Shapes: T tokens, H hidden.

use crate::layers::{
    DecoderLayer, DecoderModel, FeedForward, GqaAttention, ResidualStream, RmsNorm, RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights, qwen3};
use ops::Tensor;

/// The model.
pub(crate) type Qwen3MoeModel = DecoderModel<Qwen3MoeLayer>;

/// One layer.
#[derive(Debug)]
pub(crate) struct Qwen3MoeLayer {
    attn_norm: RmsNorm,
    attn: GqaAttention,
    mlp_norm: RmsNorm,
    mlp: FeedForward,
}

impl DecoderLayer for Qwen3MoeLayer {
    fn prefetch_next(&mut self, next: &Self) {
        if let FeedForward::Dense(mlp) = &mut self.mlp {
            mlp.prefetch_next(&next.attn);
        }
    }

    /// `x += attn(norm(x)); x += mlp(norm(x))`
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.attn.forward(f, x, &self.attn_norm, asked)?;
        self.mlp.forward(f, x, &self.mlp_norm, asked)
    }

    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        let mut attn = qwen3::attention(config, &w.at("self_attn"), rope, i)?;
        let mlp = FeedForward::load(config, &w.at("mlp"), i)?;
        if let FeedForward::Dense(mlp) = &mlp {
            attn.prefetch_next(mlp);
        }
        Ok(Self {
            attn_norm: RmsNorm::load(&w.at("input_layernorm"), config.rms_eps)?,
            attn,
            mlp_norm: RmsNorm::load(&w.at("post_attention_layernorm"), config.rms_eps)?,
            mlp,
        })
    }
}
