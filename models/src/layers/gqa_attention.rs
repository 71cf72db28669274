//! Causal grouped-query attention (GQA) over the paged KV cache.

use super::{
    ColumnParallelLinear, ResidualStream, RmsNormLayer, RotaryEmbedding, RowParallelLinear,
};
use crate::{ForwardContext, ForwardError, ModelConfig, ModelLoadError, Weights};
use ops::{AttentionShape, DType, QkRopeWeights, Tensor};

/// `x += o(softmax(rope(norm q) · rope(norm k)ᵀ / √D) · v)` of the normed stream; the inner `norm` is the QK
/// norm, if the model has one.
#[derive(Debug)]
pub(crate) struct GqaAttention {
    qkv_proj: ColumnParallelLinear,
    heads: GqaHeads,
}

/// Attention after the QKV projection `[T, (N + 2 K) D]`.
#[derive(Debug)]
pub(crate) struct GqaHeads {
    norm: Option<QkNorm>,
    rope: RotaryEmbedding,
    shape: AttentionShape,
    /// Divisors of stored keys and values. The softmax scale includes the divisor of keys, the output
    /// projection that of values.
    kv_scales: [f32; 2],
    o_proj: RowParallelLinear,
}

/// QKV projections, in the order in which they are stacked.
pub(crate) const QKV_PROJECTIONS: [&str; 3] = ["q_proj", "k_proj", "v_proj"];

/// Names under which checkpoints store the scales of a quantised KV cache.
const KV_CACHE_SCALES: [[&str; 3]; 2] =
    [["k_proj.k_scale", "attn.k_scale", "k_scale"], ["v_proj.v_scale", "attn.v_scale", "v_scale"]];

/// RMS norms of queries and keys, per head.
#[derive(Debug)]
pub(crate) struct QkNorm {
    q: Tensor, // [D]
    k: Tensor, // [D]
    eps: f32,
}

impl QkNorm {
    pub(crate) fn load(w: &Weights<'_>, eps: f32) -> Result<Self, ModelLoadError> {
        Ok(Self { q: w.vector("q_norm.weight")?, k: w.vector("k_norm.weight")?, eps })
    }
}

impl GqaAttention {
    /// Loads the attention of a layer; `layer` is the index in the KV pool.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        norm: Option<QkNorm>,
        rope: &RotaryEmbedding,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let qkv_proj = ColumnParallelLinear::load(w, &QKV_PROJECTIONS, config.qkv_bias)?;
        Ok(Self { qkv_proj, heads: GqaHeads::load(config, w, norm, rope, layer)? })
    }

    /// Updates the stream; afterwards it contains only the tokens `logits_indices`, i32 `[n]`, if given.
    pub(crate) fn forward(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let qkv = self.qkv_proj.forward(f, x, norm)?; // [T, (N + 2 K) D]
        let (heads, weights) = (&self.heads, self.heads.weights());
        let mut o = f.ops.rope_attention(&qkv, &weights, &heads.shape, f.kv, f.batch)?; // [T, N D]
        if let Some(rows) = logits_indices {
            x.retain_rows(f, rows)?; // [n, H]
            o = f.ops.gather_rows(&o, rows)?; // [n, N D]
        }
        heads.o_proj.add_to(f, x, &o) // [T or n, H]; all-reduced over f.tp
    }
}

impl GqaHeads {
    /// Loads norm, RoPE, shape and output projection; `layer` is the index in the KV pool.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        norm: Option<QkNorm>,
        rope: &RotaryEmbedding,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let heads = w.ranks().query_heads(config);
        let heads = heads.map_err(|e| w.split("q_proj", e))?.len();
        let kv_scales = match w.kv_dtype() {
            DType::F8E4M3 => {
                let [key, value] = KV_CACHE_SCALES;
                [w.scale(&key)?.unwrap_or(1.0), w.scale(&value)?.unwrap_or(1.0)]
            }
            _ => [1.0; 2],
        };
        let scale = (config.head_dim as f32).powf(-0.5) * kv_scales[0];
        Ok(Self {
            norm,
            rope: rope.clone(),
            shape: AttentionShape { heads, layer, scale, first_position: 0 },
            kv_scales,
            o_proj: RowParallelLinear::load_scaled(w, "o_proj", config.out_bias, kv_scales[1])?,
        })
    }

    /// Attention of a draft model, which has no KV at position 0: attention starts at position 1.
    pub(crate) fn forward_skipping_first(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        qkv: &Tensor,
    ) -> Result<(), ForwardError> {
        let q = self.write_kv(f, qkv)?; // [T, N D]
        let shape = AttentionShape { first_position: 1, ..self.shape };
        let o = f.ops.paged_attention(&q, &shape, f.kv, f.batch)?; // [T, N D]
        self.o_proj.add_to(f, x, &o) // [T, H]; all-reduced over f.tp
    }

    /// Writes keys and values to the KV cache and returns the queries `[T, N D]`.
    pub(crate) fn write_kv(
        &self,
        f: &ForwardContext<'_>,
        qkv: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let (ops, weights) = (f.ops, self.weights());
        Ok(ops.qk_norm_rope_kv_write(qkv, &weights, &self.shape, f.kv, f.batch)?)
    }

    fn weights(&self) -> QkRopeWeights<'_> {
        let norm = self.norm.as_ref();
        QkRopeWeights {
            q_norm: norm.map(|n| &n.q),
            k_norm: norm.map(|n| &n.k),
            eps: norm.map_or(0.0, |n| n.eps),
            rope: &self.rope.table,
            kv_scales: self.kv_scales,
        }
    }
}
