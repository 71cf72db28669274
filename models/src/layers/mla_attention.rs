//! Causal multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1) over the paged KV
//! cache, which stores one row of compressed KV per token.

use super::{ResidualStream, RmsNormLayer, RotaryEmbedding, RowParallelLinear};
use crate::config::{MlaConfig, RopeScaling};
use crate::{ForwardContext, ForwardError, KvLayerIndex, ModelConfig, ModelLoadError, Weights};
use ops::{
    AttentionKeyRange, AttentionLayerParams, MlaWeights, PackedLinear, PackedMlaUpProjections,
    Tensor,
};

/// Attention of a decoder layer: `x += o_proj(softmax(q · kᵀ · scale) · v)` with `h = norm(x)`. The KV cache
/// row of a token is `[norm(c) | rope(k_pe)]`, where `[c | k_pe] = kv_a_proj h`, `c` has kv_lora_rank
/// channels and `k_pe` has qk_rope_head_dim channels. The key of a head is `[W_UK norm(c) | rope(k_pe)]`, and
/// its value is `W_UV norm(c)`. The KV cache rows are equal on all ranks of `f.tp`; the heads are split over
/// the ranks.
#[derive(Debug)]
pub(crate) struct MlaAttentionLayer {
    query: QueryProjection,
    kv_a_proj: PackedLinear,
    kv_a_norm: RmsNormLayer,
    heads: PackedMlaUpProjections,
    rope: RotaryEmbedding,
    shape: AttentionLayerParams<'static>,
    o_proj: RowParallelLinear,
}

/// Projection from hidden states to the queries of all heads of this rank.
#[derive(Debug)]
enum QueryProjection {
    /// `q_proj h`: queries are projected from hidden states `h` directly.
    Direct(PackedLinear),
    /// `q_b_proj norm(q_a_proj h)`, with a compressed query of q_lora_rank channels.
    LowRank { q_a_proj: PackedLinear, q_a_norm: RmsNormLayer, q_b_proj: PackedLinear },
}

impl QueryProjection {
    /// Loads the query projection: the low-rank form if the model compresses queries.
    fn load(
        config: &ModelConfig,
        mla: &MlaConfig,
        w: &Weights<'_>,
    ) -> Result<Self, ModelLoadError> {
        if mla.q_lora_rank.is_none() {
            return Ok(Self::Direct(w.linear(&["q_proj"], false)?));
        }
        Ok(Self::LowRank {
            q_a_proj: w.linear(&["q_a_proj"], false)?,
            q_a_norm: RmsNormLayer::load(&w.at("q_a_layernorm"), config.rms_eps)?,
            q_b_proj: w.linear(&["q_b_proj"], false)?,
        })
    }
}

impl MlaAttentionLayer {
    /// Loads the attention of layer `layer`: a decoder layer, or an MTP module after the decoder layers.
    pub(crate) fn load(
        config: &ModelConfig,
        mla: &MlaConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let KvLayerIndex { group, layer: pool_layer } = w.kv_layer(layer);
        let heads = w.ranks().query_heads(config);
        let heads = heads.map_err(|e| w.split("kv_b_proj", e))?.len();
        Ok(Self {
            query: QueryProjection::load(config, mla, w)?,
            kv_a_proj: w.linear(&["kv_a_proj_with_mqa"], false)?,
            kv_a_norm: RmsNormLayer::load(&w.at("kv_a_layernorm"), config.rms_eps)?,
            heads: w.mla_heads("kv_b_proj", mla.qk_nope_head_dim, mla.v_head_dim)?,
            rope: rope.clone(),
            shape: AttentionLayerParams {
                heads,
                group,
                layer: pool_layer,
                scale: softmax_scale(config),
                // An MTP module has no KV at position 0, because no hidden state precedes the first token.
                keys: AttentionKeyRange {
                    first_position: usize::from(layer >= config.layers),
                    window: None,
                },
                sinks: None,
            },
            o_proj: RowParallelLinear::load(w, "o_proj", false)?,
        })
    }

    /// Updates the residual stream `x`. If `logits_indices`, i32 `[rows]`, are given, only the rows of the
    /// tokens at these indices remain in the stream afterwards.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let h = x.normed(f, norm)?; // [tokens, hidden size]
        let q = match &self.query {
            QueryProjection::Direct(w) => f.ops.linear(&h, w)?,
            QueryProjection::LowRank { q_a_proj: a, q_a_norm: norm, q_b_proj: b } => {
                let compressed = f.ops.rms_norm(&f.ops.linear(&h, a)?, &norm.weight, norm.eps)?;
                f.ops.linear(&compressed, b)?
            }
        }; // [tokens, heads · head_dim]
        let kv = f.ops.linear(&h, &self.kv_a_proj)?; // [tokens, compressed KV + RoPE]
        let (ops, weights) = (f.ops, self.weights());
        let mut o = ops.mla_attention(q, &kv, &weights, &self.shape, f.kv, f.batch)?;
        if let Some(rows) = logits_indices {
            x.retain_rows(f, rows)?; // [rows, hidden size]
            o = f.ops.gather_rows(&o, rows)?; // [rows, heads · v_head_dim]
        }
        self.o_proj.add_to(f, x, &o, None) // [tokens or rows, hidden size]; all-reduced over f.tp
    }

    /// Writes the compressed KV of the tokens in `x` to the KV cache, for attention of later tokens.
    pub(crate) fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
    ) -> Result<(), ForwardError> {
        let kv = f.ops.linear(&x.normed(f, norm)?, &self.kv_a_proj)?; // [tokens, compressed KV + RoPE]
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

/// Softmax scale: `(qk_nope_head_dim + qk_rope_head_dim)^-½`. With YaRN it is multiplied by the square of the
/// factor that is derived from `mscale_all_dim` (transformers 5.23 `modeling_deepseek_v3.py`,
/// `yarn_apply_mscale`).
fn softmax_scale(config: &ModelConfig) -> f32 {
    let gain = match config.rope.scaling {
        RopeScaling::Yarn { all_dim_gain, .. } => all_dim_gain,
        _ => 1.0,
    };
    ((config.head_dim as f64).powf(-0.5) * gain * gain) as f32
}
