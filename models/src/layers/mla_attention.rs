//! Causal multi-head latent attention (MLA) over compressed KV, one row per token (DeepSeek-V2, arXiv
//! 2405.04434, section 2.1).

use super::{ResidualStream, RmsNormLayer, RotaryEmbedding, RowParallelLinear};
use crate::config::{MlaConfig, RopeScaling};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{AttentionShape, MlaWeights, PackedLinear, PackedMlaHeads, Tensor};

/// `x += o(softmax(q · kᵀ · scale) · v)` of the normed stream `h`. The cache row of a token is
/// `[norm(c) | rope(k_pe)]`, with `[c | k_pe] = kv_a_proj h`; the key of a head is `[W_UK c | k_pe]`, its
/// value `W_UV c`. All TP ranks have the same rows; heads are split over the ranks. `N` heads, `M`
/// qk_nope_head_dim, `P` qk_rope_head_dim, `C` kv_lora_rank, `V` v_head_dim.
#[derive(Debug)]
pub(crate) struct MlaAttentionLayer {
    query: QueryProjection,
    kv_a_proj: PackedLinear,
    kv_a_norm: RmsNormLayer,
    heads: PackedMlaHeads,
    rope: RotaryEmbedding,
    shape: AttentionShape,
    o_proj: RowParallelLinear,
}

/// Query projection.
#[derive(Debug)]
enum QueryProjection {
    /// Computes `W h`.
    Direct(PackedLinear),
    /// Computes `W_b norm(W_a h)`.
    LowRank { q_a_proj: PackedLinear, q_a_norm: RmsNormLayer, q_b_proj: PackedLinear },
}

impl MlaAttentionLayer {
    /// Loads the attention of a layer; `layer` is the index in the KV pool.
    pub(crate) fn load(
        config: &ModelConfig,
        mla: &MlaConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let heads = w.ranks().query_heads(config);
        let heads = heads.map_err(|e| w.split("kv_b_proj", e))?.len();
        let query = match mla.q_lora_rank {
            None => QueryProjection::Direct(w.linear(&["q_proj"], false)?),
            Some(_) => QueryProjection::LowRank {
                q_a_proj: w.linear(&["q_a_proj"], false)?,
                q_a_norm: RmsNormLayer::load(&w.at("q_a_layernorm"), config.rms_eps)?,
                q_b_proj: w.linear(&["q_b_proj"], false)?,
            },
        };
        Ok(Self {
            query,
            kv_a_proj: w.linear(&["kv_a_proj_with_mqa"], false)?,
            kv_a_norm: RmsNormLayer::load(&w.at("kv_a_layernorm"), config.rms_eps)?,
            heads: w.mla_heads("kv_b_proj", mla.qk_nope_head_dim, mla.v_head_dim)?,
            rope: rope.clone(),
            shape: AttentionShape {
                heads,
                layer,
                scale: softmax_scale(config),
                // An MTP module has no KV of the first token: no hidden state precedes it.
                first_position: usize::from(layer >= config.layers),
            },
            o_proj: RowParallelLinear::load(w, "o_proj", false)?,
        })
    }

    /// Updates the stream; afterwards it contains only the tokens `logits_indices`, i32 `[n]`, if given.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let h = x.normed(f, norm)?; // [T, H]
        let q = match &self.query {
            QueryProjection::Direct(w) => f.ops.linear(&h, w)?,
            QueryProjection::LowRank { q_a_proj: a, q_a_norm: norm, q_b_proj: b } => {
                let compressed = f.ops.rms_norm(&f.ops.linear(&h, a)?, &norm.weight, norm.eps)?;
                f.ops.linear(&compressed, b)?
            }
        }; // [T, N (M + P)]
        let kv = f.ops.linear(&h, &self.kv_a_proj)?; // [T, C + P]
        let (ops, weights) = (f.ops, self.weights());
        let mut o = ops.mla_attention(q, &kv, &weights, &self.shape, f.kv, f.batch)?;
        if let Some(rows) = logits_indices {
            x.retain_rows(f, rows)?; // [n, H]
            o = f.ops.gather_rows(&o, rows)?; // [n, N V]
        }
        self.o_proj.add_to(f, x, &o) // [T or n, H]; all-reduced over f.tp
    }

    /// Writes the compressed KV to the cache for later tokens.
    pub(crate) fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
    ) -> Result<(), ForwardError> {
        let kv = f.ops.linear(&x.normed(f, norm)?, &self.kv_a_proj)?; // [T, C + P]
        let (weights, layer) = (self.weights(), self.shape.layer);
        Ok(f.ops.mla_write_kv_only(&kv, &weights, layer, f.kv, f.batch)?)
    }

    fn weights(&self) -> MlaWeights<'_> {
        MlaWeights {
            norm: &self.kv_a_norm.weight,
            eps: self.kv_a_norm.eps,
            rope: &self.rope.table,
            heads: &self.heads,
        }
    }
}

/// `(M + P)^-½`, times the square of YaRN's factor from `mscale_all_dim` (transformers 5.23
/// `modeling_deepseek_v3.py`, `yarn_apply_mscale`).
fn softmax_scale(config: &ModelConfig) -> f32 {
    let gain = match config.rope.scaling {
        RopeScaling::Yarn { all_dim_gain, .. } => all_dim_gain,
        _ => 1.0,
    };
    ((config.head_dim as f64).powf(-0.5) * gain * gain) as f32
}
