//! Llama 2, 3 and 3.x (`LlamaForCausalLM`), after transformers `modeling_llama.py`.
//!
//! Rope is default, linear, llama3 or yarn; biases and tied heads as the configuration says.
//! Goldens: `tests/data/golden/llama-*`. Shapes: T tokens, H hidden.

use crate::layers::{Attention, Decoder, DecoderLayer, GatedMlp, Residual, RmsNorm, Rope};
use crate::{Config, Forward, ForwardError, LoadError, Weights};
use ops::Tensor;

/// The model.
pub(crate) type Llama = Decoder<Layer>;

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
        let mut attn = Attention::load(config, &w.at("self_attn"), None, rope, i)?;
        let mlp = GatedMlp::load(&w.at("mlp"), config.mlp_bias)?;
        attn.precede(&mlp);
        Ok(Self {
            attn_norm: RmsNorm::load(&w.at("input_layernorm"), config.rms_eps)?,
            attn,
            mlp_norm: RmsNorm::load(&w.at("post_attention_layernorm"), config.rms_eps)?,
            mlp,
        })
    }
}
