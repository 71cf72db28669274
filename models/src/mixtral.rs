//! Mixtral (`MixtralForCausalLM`), after transformers `modeling_mixtral.py`.
//!
//! Mixtral is Mistral with experts instead of a dense MLP in every layer. The weights of the selected experts are
//! a softmax over their router logits. Reference outputs for tests: `tests/data/golden/mixtral-*`.

use crate::layers::{
    DecoderLayer, DecoderModel, FeedForward, GqaAttention, ResidualStream, RmsNormLayer,
    RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Mixtral model.
pub(crate) type MixtralModel = DecoderModel<MixtralLayer>;

/// Decoder layer of Mixtral: GQA, followed by experts.
#[derive(Debug)]
pub(crate) struct MixtralLayer {
    attn_norm: RmsNormLayer,
    attn: GqaAttention,
    mlp_norm: RmsNormLayer,
    mlp: FeedForward,
}

impl DecoderLayer for MixtralLayer {
    /// Computes `x += attn(attn_norm(x)); x += mlp(mlp_norm(x))`.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.attn.forward(f, x, &self.attn_norm, logits_indices)?;
        self.mlp.forward(f, x, &self.mlp_norm, logits_indices)
    }

    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        Ok(Self {
            attn_norm: RmsNormLayer::load(&w.at("input_layernorm"), config.rms_eps)?,
            attn: GqaAttention::load(config, &w.at("self_attn"), None, rope, i)?,
            mlp_norm: RmsNormLayer::load(&w.at("post_attention_layernorm"), config.rms_eps)?,
            mlp: FeedForward::load(config, &w.at("mlp"), i)?,
        })
    }
}
