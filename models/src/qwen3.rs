//! Qwen3 dense (`Qwen3ForCausalLM`), after transformers `modeling_qwen3.py`.
//!
//! Queries and keys are normalised per head before the rotation; the head size is a field of its own.
//! Goldens: `tests/data/golden/qwen3-*`. Shapes: T tokens, H hidden.

use crate::layers::{Attention, Decoder, DecoderLayer, GatedMlp, QkNorm, Residual, RmsNorm, Rope};
use crate::{Config, Forward, ForwardError, LoadError, Weights};
use ops::Tensor;

/// The model.
pub(crate) type Qwen3 = Decoder<Layer>;

/// One layer.
#[derive(Debug)]
pub(crate) struct Layer {
    attn_norm: RmsNorm,
    attn: Attention,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
}

impl DecoderLayer for Layer {
    fn precede(&mut self, next: &Self) {
        self.mlp.precede(&next.attn);
    }

    /// `x += attn(norm(x)); x += mlp(norm(x))`
    fn forward(
        &self,
        f: &Forward<'_>,
        x: &mut Residual,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        self.attn.forward(f, x, &self.attn_norm, asked)?;
        self.mlp.forward(f, x, &self.mlp_norm)
    }

    fn load(config: &Config, w: &Weights<'_>, rope: &Rope, i: usize) -> Result<Self, LoadError> {
        let mut attn = attention(config, &w.at("self_attn"), rope, i)?;
        let mlp = GatedMlp::load(&w.at("mlp"), false)?;
        attn.precede(&mlp);
        Ok(Self {
            attn_norm: RmsNorm::load(&w.at("input_layernorm"), config.rms_eps)?,
            attn,
            mlp_norm: RmsNorm::load(&w.at("post_attention_layernorm"), config.rms_eps)?,
            mlp,
        })
    }
}

/// Qwen3 attention, dense and with experts: queries and keys are normalised.
pub(crate) fn attention(
    config: &Config,
    w: &Weights<'_>,
    rope: &Rope,
    i: usize,
) -> Result<Attention, LoadError> {
    let norm = QkNorm::load(w, config.rms_eps)?;
    Attention::load(config, w, Some(norm), rope, i)
}
