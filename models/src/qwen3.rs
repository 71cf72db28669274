//! Qwen3 dense (`Qwen3ForCausalLM`), based on transformers `modeling_qwen3.py`.
//!
//! Queries and keys have an RMS norm per head before RoPE; `head_dim` is independent of the hidden size.
//! Reference outputs for tests: `tests/data/golden/qwen3-*`.

use crate::layers::{
    DecoderLayer, DecoderModel, GatedMlp, GqaAttention, ResidualStream, RmsNormLayer,
    RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{GateActivation, Tensor};

/// Qwen3 model without experts.
pub(crate) type Qwen3Model = DecoderModel<Qwen3Layer>;

/// Decoder layer of Qwen3: GQA with QK norm, followed by a gated MLP.
#[derive(Debug)]
pub(crate) struct Qwen3Layer {
    attn_norm: RmsNormLayer,
    attn: GqaAttention,
    mlp_norm: RmsNormLayer,
    mlp: GatedMlp,
}

impl DecoderLayer for Qwen3Layer {
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
        let attn = GqaAttention::load(config, &w.at("self_attn"), rope, i)?;
        let mlp = GatedMlp::load(&w.at("mlp"), false, GateActivation::Silu)?;
        Ok(Self {
            attn_norm: RmsNormLayer::load(&w.at("input_layernorm"), config.stream_eps())?,
            attn,
            mlp_norm: RmsNormLayer::load(&w.at("post_attention_layernorm"), config.stream_eps())?,
            mlp,
        })
    }
}
