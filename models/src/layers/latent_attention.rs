//! Causal attention over one latent row per token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

use super::{Residual, RmsNorm, Rope, RowParallelLinear};
use crate::config::{LatentConfig, RopeScaling};
use crate::{Config, Forward, ForwardError, LoadError, Weights};
use ops::{AttentionShape, LatentWeights, PackedLatentHeads, PackedLinear, Tensor};

/// `x += o(softmax(q · kᵀ · scale) · v)` of the normed stream `h`. Every token keeps `[norm(c) | rope(k_pe)]` of `[c | k_pe] = kv_a h`;
/// a head's key is `[W_k c | k_pe]`, its value `W_v c`. Ranks share the row and split the heads.
#[derive(Debug)]
pub(crate) struct LatentAttention {
    query: Query,
    kv_a: PackedLinear,
    kv_norm: RmsNorm,
    heads: PackedLatentHeads,
    rope: Rope,
    shape: AttentionShape,
    /// First position that is seen.
    first: usize,
    out: RowParallelLinear,
}

/// Where queries come from.
#[derive(Debug)]
enum Query {
    /// `W h`
    Whole(PackedLinear),
    /// `W_b norm(W_a h)`
    Latent { a: PackedLinear, norm: RmsNorm, b: PackedLinear },
}

impl LatentAttention {
    /// `layer` is the layer of the KV pool.
    pub(crate) fn load(
        config: &Config,
        latent: &LatentConfig,
        w: &Weights<'_>,
        rope: &Rope,
        layer: usize,
    ) -> Result<Self, LoadError> {
        let heads = w.ranks().query_heads(config);
        let heads = heads.map_err(|e| w.split("kv_b_proj", e))?.len();
        let query = match latent.query {
            None => Query::Whole(w.linear(&["q_proj"], false)?),
            Some(_) => Query::Latent {
                a: w.linear(&["q_a_proj"], false)?,
                norm: RmsNorm::load(&w.at("q_a_layernorm"), config.rms_eps)?,
                b: w.linear(&["q_b_proj"], false)?,
            },
        };
        Ok(Self {
            query,
            kv_a: w.linear(&["kv_a_proj_with_mqa"], false)?,
            kv_norm: RmsNorm::load(&w.at("kv_a_layernorm"), config.rms_eps)?,
            heads: w.latent_heads("kv_b_proj", (latent.unturned, latent.value))?,
            rope: rope.clone(),
            shape: AttentionShape { heads, layer, scale: scale(config) },
            // A draft layer has nothing of the first token: no hidden state comes before it.
            first: usize::from(layer >= config.layers),
            out: RowParallelLinear::load(w, "o_proj", false)?,
        })
    }

    /// With `asked`, i32 `[n]`, the stream is of those tokens alone from here on.
    pub(crate) fn forward(
        &self,
        f: &Forward<'_>,
        x: &mut Residual,
        norm: &RmsNorm,
        asked: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let h = x.normed(f, norm)?; // [T, H]
        let q = match &self.query {
            Query::Whole(w) => f.ops.linear(&h, w)?,
            Query::Latent { a, norm, b } => {
                let latent = f.ops.rms_norm(&f.ops.linear(&h, a)?, &norm.weight, norm.eps)?;
                f.ops.linear(&latent, b)?
            }
        }; // [T, N (M + P)]
        let kv = f.ops.linear(&h, &self.kv_a)?; // [T, C + P]
        let (shape, weights) = ((&self.shape, self.first), self.weights());
        let mut o = f.ops.latent_attention(q, &kv, &weights, shape, (f.kv, f.batch))?;
        if let Some(rows) = asked {
            x.keep(f, rows)?; // [n, H]
            o = f.ops.gather_rows(&o, rows)?; // [n, N V]
        }
        self.out.add_to(f, x, &o) // [T or n, H]; all-reduced over f.tp
    }

    /// Keeps what later tokens attend to.
    pub(crate) fn keep(
        &self,
        f: &Forward<'_>,
        x: &mut Residual,
        norm: &RmsNorm,
    ) -> Result<(), ForwardError> {
        let kv = f.ops.linear(&x.normed(f, norm)?, &self.kv_a)?; // [T, C + P]
        let pool = (f.kv, f.batch);
        Ok(f.ops.keep_latents(&kv, &self.weights(), self.shape.layer, pool)?)
    }

    fn weights(&self) -> LatentWeights<'_> {
        LatentWeights {
            norm: &self.kv_norm.weight,
            eps: self.kv_norm.eps,
            rope: &self.rope.table,
            heads: &self.heads,
        }
    }
}

/// `(M + P)^-½`, times the square of what yarn says of all channels (transformers 5.23 `modeling_deepseek_v3.py`,
/// `yarn_apply_mscale`).
fn scale(config: &Config) -> f32 {
    let gain = match config.rope.scaling {
        RopeScaling::Yarn { all_dim_gain, .. } => all_dim_gain,
        _ => 1.0,
    };
    ((config.head_dim as f64).powf(-0.5) * gain * gain) as f32
}
