//! Llama 2, 3 and 3.x (`LlamaForCausalLM`), after transformers `modeling_llama.py`.
//!
//! RoPE scaling is default, linear, llama3 or yarn; biases and tied heads follow the configuration.
//! Goldens: `tests/data/golden/llama-*`. Shapes: T tokens, H hidden.

use crate::layers::{
    DecoderLayer, DecoderModel, GatedMlp, GqaAttention, ResidualStream, RmsNormLayer,
    RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Llama model.
pub(crate) type LlamaModel = DecoderModel<LlamaLayer>;

/// Decoder layer.
#[derive(Debug)]
pub(crate) struct LlamaLayer {
    attn_norm: RmsNormLayer,
    attn: GqaAttention,
    mlp_norm: RmsNormLayer,
    mlp: GatedMlp,
}

impl DecoderLayer for LlamaLayer {
    /// Computes `x += attn(norm(x)); x += mlp(norm(x))`.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.attn.forward(f, x, &self.attn_norm, logits_indices)?;
        self.mlp.forward(f, x, &self.mlp_norm)
    }

    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        let attn = GqaAttention::load(config, &w.at("self_attn"), None, rope, i)?;
        let mlp = GatedMlp::load(&w.at("mlp"), config.mlp_bias)?;
        Ok(Self {
            attn_norm: RmsNormLayer::load(&w.at("input_layernorm"), config.rms_eps)?,
            attn,
            mlp_norm: RmsNormLayer::load(&w.at("post_attention_layernorm"), config.rms_eps)?,
            mlp,
        })
    }
}
