//! Llama 2, 3 and 3.x (`LlamaForCausalLM`), based on transformers `modeling_llama.py`.
//!
//! RoPE scaling is default, linear, llama3, yarn or longrope; the configuration determines biases, norms, windows,
//! activation, multipliers and whether the LM head is tied. All dense architectures with GQA use this layer, except
//! Qwen3 and its variants; `config/architecture_traits.rs` lists them and their differences, which are those of
//! transformers (`modeling_*.py`). Reference outputs for tests: `tests/data/golden`, one name per architecture.

use crate::layers::{
    DecoderLayer, DecoderModel, GatedMlp, GqaAttention, ResidualStream, RotaryEmbedding,
    SublayerNorms,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Model with layers of Llama.
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
