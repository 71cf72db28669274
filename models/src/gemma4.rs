//! Gemma 4 (`Gemma4ForCausalLM`, and the text parts of `Gemma4ForConditionalGeneration` and
//! `Gemma4UnifiedForConditionalGeneration`), based on transformers `modeling_gemma4.py`.
//!
//! Layers have sandwich norms, QK norms and a value norm without weights, and their output is multiplied by a number.
//! Layers without a window have other KV heads and proportional RoPE; their key projection may compute the values too. The
//! last layers may read the keys and values of earlier layers. 26B-A4B has experts in parallel with the dense MLP; E2B and E4B have
//! per-layer inputs. Reference outputs for tests: `tests/data/golden/gemma4-*`.

use crate::layers::{
    DecoderLayer, DecoderModel, GatedMlp, GqaAttention, LayerInputMlp, ParallelExperts,
    ResidualStream, RotaryEmbedding, SublayerNorms,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::Tensor;

/// Gemma 4 model.
pub(crate) type Gemma4Model = DecoderModel<Gemma4Layer>;

/// Decoder layer of Gemma 4: GQA, a gated MLP with or without experts in parallel, and the per-layer input.
#[derive(Debug)]
pub(crate) struct Gemma4Layer {
    attn_norms: SublayerNorms,
    attn: GqaAttention,
    mlp_norms: SublayerNorms,
    mlp: GatedMlp,
    experts: Option<Box<ParallelExperts>>,
    input: Option<LayerInputMlp>,
    /// Factor of the residual stream after the layer.
    scalar: f32,
}

impl DecoderLayer for Gemma4Layer {
    /// Computes `x += norm(attn(norm(x))); x += norm(mlp(norm(x)))`, adds the per-layer input, and multiplies `x` by the
    /// scalar of the layer.
    fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.attn.forward(f, x, &self.attn_norms, logits_indices)?;
        match &self.experts {
            Some(experts) => experts.forward(f, x, &self.mlp, &self.mlp_norms, logits_indices)?,
            None => self.mlp.forward(f, x, &self.mlp_norms)?,
        }
        if let Some(input) = &self.input {
            input.forward(f, x)?;
        }
        x.scale_by(f, self.scalar)
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
        let experts = config.moe_at(i).map(|moe| ParallelExperts::load(config, moe, w, i));
        let scalar = w.host_vector("layer_scalar")?;
        Ok(Self {
            attn_norms,
            attn,
            mlp_norms,
            mlp,
            experts: experts.transpose()?.map(Box::new),
            input: LayerInputMlp::load(config, w, i)?,
            scalar: scalar.first().copied().unwrap_or(1.0),
        })
    }
}
