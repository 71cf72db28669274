//! Llama 2, 3 and 3.x (`LlamaForCausalLM`), after transformers `modeling_llama.py`.
//!
//! RoPE scaling is default, linear, llama3 or yarn; the configuration decides whether projections have biases
//! and whether the LM head is tied. Architectures whose layers differ in the configuration only use the same layer:
//! Granite (`modeling_granite.py`: multipliers), SmolLM3 (`modeling_smollm3.py`: layers without RoPE) and Seed-OSS
//! (`modeling_seed_oss.py`: biases). Reference outputs for tests: `tests/data/golden/{llama,granite,smollm3,seed_oss}-*`.

use crate::layers::{
    DecoderLayer, DecoderModel, GatedMlp, GqaAttention, ResidualStream, RmsNormLayer,
    RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Llama 2 or Llama 3 model.
pub(crate) type LlamaModel = DecoderModel<LlamaLayer>;

/// Decoder layer of Llama: GQA, followed by a gated MLP.
#[derive(Debug)]
pub(crate) struct LlamaLayer {
    attn_norm: RmsNormLayer,
    attn: GqaAttention,
    mlp_norm: RmsNormLayer,
    mlp: GatedMlp,
}

impl DecoderLayer for LlamaLayer {
    /// Computes `x += attn(attn_norm(x)); x += mlp(mlp_norm(x))`.
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
            attn_norm: RmsNormLayer::load(&w.at("input_layernorm"), config.stream_eps())?,
            attn,
            mlp_norm: RmsNormLayer::load(&w.at("post_attention_layernorm"), config.stream_eps())?,
            mlp,
        })
    }
}
