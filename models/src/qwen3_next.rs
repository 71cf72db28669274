//! Qwen3-Next (`Qwen3NextForCausalLM`) and Qwen3.5 (`Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM` and the text parts of
//! their multimodal variants), based on transformers `modeling_qwen3_next.py`, `modeling_qwen3_5.py` and
//! `modeling_qwen3_5_moe.py`.
//!
//! Most layers are gated delta nets; the other layers are GQA with QK norm, partial RoPE and an output gate. Norm
//! weights are zero-centred, except those in gated delta nets. The two families store the input projections of gated
//! delta nets differently. Checkpoints have an MTP module, whose decoder layer is an attention layer. Reference outputs
//! for tests: `tests/data/golden/qwen3_next-*`, `qwen3_5*`.

use crate::layers::{
    DecoderLayer, DecoderModel, FeedForward, GatedDeltaNet, GqaAttention, ResidualStream,
    RmsNormLayer, RotaryEmbedding,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Qwen3-Next or Qwen3.5 model.
pub(crate) type Qwen3NextModel = DecoderModel<Qwen3NextLayer>;

/// Decoder layer: gated delta net or attention, followed by experts or a dense MLP.
#[derive(Debug)]
pub(crate) struct Qwen3NextLayer {
    mixer_norm: RmsNormLayer,
    mixer: TokenMixer,
    mlp_norm: RmsNormLayer,
    mlp: FeedForward,
}

/// Part of a layer that combines tokens of different positions.
#[derive(Debug)]
enum TokenMixer {
    Attention(Box<GqaAttention>),
    DeltaNet(Box<GatedDeltaNet>),
}

impl DecoderLayer for Qwen3NextLayer {
    /// Computes `x += mixer(mixer_norm(x)); x += mlp(mlp_norm(x))`.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        match &self.mixer {
            TokenMixer::Attention(attn) => attn.forward(f, x, &self.mixer_norm, logits_indices)?,
            TokenMixer::DeltaNet(net) => net.forward(f, x, &self.mixer_norm, logits_indices)?,
        }
        self.mlp.forward(f, x, &self.mlp_norm, logits_indices)
    }

    /// Only MTP modules, which are attention layers, are run without their MLP.
    fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
    ) -> Result<(), ForwardError> {
        match &self.mixer {
            TokenMixer::Attention(attn) => attn.write_kv_only(f, x, &self.mixer_norm),
            TokenMixer::DeltaNet(_) => self.forward(f, x, None),
        }
    }

    fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        i: usize,
    ) -> Result<Self, ModelLoadError> {
        let delta = config.gated_delta.as_ref().filter(|delta| delta.is_delta(i));
        let mixer = if let Some(delta) = delta {
            let net = GatedDeltaNet::load(config, delta, &w.at("linear_attn"), i)?;
            TokenMixer::DeltaNet(Box::new(net))
        } else {
            let attn = GqaAttention::load(config, &w.at("self_attn"), rope, i)?;
            TokenMixer::Attention(Box::new(attn))
        };
        Ok(Self {
            mixer_norm: RmsNormLayer::load(&w.at("input_layernorm"), config.stream_eps())?,
            mixer,
            mlp_norm: RmsNormLayer::load(&w.at("post_attention_layernorm"), config.stream_eps())?,
            mlp: FeedForward::load(config, &w.at("mlp"), i)?,
        })
    }
}
