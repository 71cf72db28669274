//! DeepSeek-V2, V3 and R1 (`DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM`), based on transformers
//! `modeling_deepseek_v2.py` and `modeling_deepseek_v3.py`.
//!
//! Attention is multi-head latent attention (MLA). The first layers have a dense MLP; all other layers have
//! routed and shared experts. V2 computes router scores by softmax, V3 by sigmoid with a correction bias;
//! both may use group-limited routing. V3 has an MTP module. Reference outputs for tests:
//! `tests/data/golden/deepseek_v*`.

use crate::config::MlaConfig;
use crate::layers::{
    DecoderLayer, DecoderModel, FeedForward, MlaAttentionLayer, ResidualStream, RmsNormLayer,
    RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// DeepSeek-V2, V3 or R1 model.
pub(crate) type DeepseekModel = DecoderModel<DeepseekLayer>;

/// Decoder layer of DeepSeek models: MLA, followed by a dense MLP or experts.
#[derive(Debug)]
pub(crate) struct DeepseekLayer {
    attn_norm: RmsNormLayer,
    attn: MlaAttentionLayer,
    mlp_norm: RmsNormLayer,
    mlp: FeedForward,
}

impl DecoderLayer for DeepseekLayer {
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

    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
    ) -> Result<(), ForwardError> {
        self.attn.write_kv_only(f, x, &self.attn_norm)
    }

    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        let Some(mla): Option<&MlaConfig> = config.mla.as_ref() else {
            let what = "needs MLA dimensions, which the configuration lacks";
            return Err(ModelLoadError::table("self_attn", what));
        };
        Ok(Self {
            attn_norm: RmsNormLayer::load(&w.at("input_layernorm"), config.rms_eps)?,
            attn: MlaAttentionLayer::load(config, mla, &w.at("self_attn"), rope, i)?,
            mlp_norm: RmsNormLayer::load(&w.at("post_attention_layernorm"), config.rms_eps)?,
            mlp: FeedForward::load(config, &w.at("mlp"), i)?,
        })
    }
}
