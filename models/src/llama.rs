//! Llama 2, 3 and 3.x (`LlamaForCausalLM`), based on transformers `modeling_llama.py`.
//!
//! RoPE scaling is default, linear, llama3 or yarn; the configuration determines whether projections have
//! biases and whether the LM head is tied. The same layer is used for architectures that differ only in their
//! configuration: Granite (`modeling_granite.py`, `modeling_granitemoehybrid.py`: multipliers), SmolLM3
//! (`modeling_smollm3.py`: layers without RoPE), Seed-OSS (`modeling_seed_oss.py`: biases), ERNIE 4.5
//! (`modeling_ernie4_5.py`: interleaved RoPE), GLM-4 (`modeling_glm.py`, `modeling_glm4.py`: interleaved partial RoPE, fused
//! gate and up projections, sandwich norms), OLMo 2 and 3
//! (`modeling_olmo2.py`, `modeling_olmo3.py`: output norms, QK norm over all heads) and Gemma 3
//! (`modeling_gemma3.py`: sliding windows, two RoPE settings, sandwich norms, GELU). Reference outputs for tests:
//! `tests/data/golden/{llama,granite,granite4,smollm3,seed_oss,ernie4_5,glm,glm4,olmo2,olmo3,gemma3}-*`.

use crate::layers::{
    DecoderLayer, DecoderModel, GatedMlp, GqaAttention, ResidualStream, RotaryEmbedding,
    SublayerNorms,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Llama 2 or Llama 3 model.
pub(crate) type LlamaModel = DecoderModel<LlamaLayer>;

/// Decoder layer of Llama: GQA, followed by a gated MLP.
#[derive(Debug)]
pub(crate) struct LlamaLayer {
    attn_norms: SublayerNorms,
    attn: GqaAttention,
    mlp_norms: SublayerNorms,
    mlp: GatedMlp,
}

impl DecoderLayer for LlamaLayer {
    /// Computes `x += attn(norm(x)); x += mlp(norm(x))`; with output norms `x += norm(attn(x)); x +=
    /// norm(mlp(x))`; with sandwich norms `x += norm(attn(norm(x))); x += norm(mlp(norm(x)))`.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.attn.forward(f, x, &self.attn_norms, logits_indices)?;
        self.mlp.forward(f, x, &self.mlp_norms)
    }

    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        let attn = GqaAttention::load(config, &w.at("self_attn"), rope, i)?;
        let mlp = GatedMlp::load(&w.at("mlp"), config.mlp_bias, config.gate_activation())?;
        let [attn_norms, mlp_norms] = SublayerNorms::load_both(config, w)?;
        Ok(Self { attn_norms, attn, mlp_norms, mlp })
    }
}
