//! Qwen3 MoE (`Qwen3MoeForCausalLM`), Qwen2 MoE (`Qwen2MoeForCausalLM`), Mixtral (`MixtralForCausalLM`) and gpt-oss
//! (`GptOssForCausalLM`), based on transformers `modeling_qwen3_moe.py`, `modeling_qwen2_moe.py`, `modeling_mixtral.py`
//! and `modeling_gpt_oss.py`.
//!
//! Qwen3 MoE is Qwen3 with experts instead of a dense MLP in the layers that the configuration selects. The GEMM and the
//! softmax of the router are computed in f32 for every dtype. Qwen2 MoE has biases instead of QK norm, and a shared expert
//! with a gate. Mixtral has experts in every layer; the routing weights of the selected experts are the softmax over their
//! router logits. gpt-oss has biases, attention sinks, a sliding window in every second layer and a clamped activation;
//! its norm weights are multiplied in f32, and published checkpoints store the experts in MXFP4. Reference outputs for
//! tests: `tests/data/golden/{qwen3_moe,qwen2_moe,mixtral,gpt_oss}-*`.

use crate::layers::{
    DecoderLayer, DecoderModel, FeedForward, GqaAttention, ResidualStream, RmsNormLayer,
    RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Model with layers of Qwen3 MoE.
pub(crate) type Qwen3MoeModel = DecoderModel<Qwen3MoeLayer>;

/// Decoder layer of Qwen3 MoE: GQA with QK norm, followed by experts or a dense MLP.
#[derive(Debug)]
pub(crate) struct Qwen3MoeLayer {
    attn_norm: RmsNormLayer,
    attn: GqaAttention,
    mlp_norm: RmsNormLayer,
    mlp: FeedForward,
}

impl DecoderLayer for Qwen3MoeLayer {
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
        let attn = GqaAttention::load(config, &w.at("self_attn"), rope, i)?;
        let mlp = FeedForward::load(config, &w.at("mlp"), i)?;
        Ok(Self {
            attn_norm: RmsNormLayer::load(&w.at("input_layernorm"), config.stream_eps())?,
            attn,
            mlp_norm: RmsNormLayer::load(&w.at("post_attention_layernorm"), config.stream_eps())?,
            mlp,
        })
    }
}
