//! Qwen3 with experts (`Qwen3MoeForCausalLM`), after transformers `modeling_qwen3_moe.py`.
//!
//! Qwen3 whose MLP is a mixture of experts in the layers that the configuration names; the router's
//! sums and softmax are f32 in every dtype. Goldens: `tests/data/golden/qwen3_moe-*`.
//! Shapes: T tokens, H hidden.

use crate::layers::{Attention, Decoder, DecoderLayer, FeedForward, Residual, RmsNorm, Rope};
use crate::{Config, Forward, ForwardError, LoadError, Weights, qwen3};
use ops::Tensor;

/// The model.
pub(crate) type Qwen3Moe = Decoder<Layer>;

/// One layer.
#[derive(Debug)]
pub(crate) struct Layer {
    attn_norm: RmsNorm,
    attn: Attention,
    mlp_norm: RmsNorm,
    mlp: FeedForward,
}

impl DecoderLayer for Layer {
    fn precede(&mut self, next: &Self) {
        if let FeedForward::Dense(mlp) = &mut self.mlp {
            mlp.precede(&next.attn);
        }
    }

    /// `x += attn(norm(x)); x += mlp(norm(x))`
    fn forward(
        &self,
        f: &Forward<'_>,
        x: &mut Residual,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.attn.forward(f, x, &self.attn_norm, asked)?;
        self.mlp.forward(f, x, &self.mlp_norm, asked)
    }

    fn load(config: &Config, w: &Weights<'_>, rope: &Rope, i: usize) -> Result<Self, LoadError> {
        let mut attn = qwen3::attention(config, &w.at("self_attn"), rope, i)?;
        let mlp = FeedForward::load(config, &w.at("mlp"), i)?;
        if let FeedForward::Dense(mlp) = &mlp {
            attn.precede(mlp);
        }
        Ok(Self {
            attn_norm: RmsNorm::load(&w.at("input_layernorm"), config.rms_eps)?,
            attn,
            mlp_norm: RmsNorm::load(&w.at("post_attention_layernorm"), config.rms_eps)?,
            mlp,
        })
    }
}
