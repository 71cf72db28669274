//! Causal grouped-query attention (GQA) over the paged KV cache.

use super::{
    ColumnParallelLinear, FullQkNorm, LayerKvScales, ResidualStream, RmsNormLayer, RotaryEmbedding,
    RowParallelLinear, SublayerNormRefs,
};
use crate::config::KvProjectionKind;
use crate::{ForwardContext, ForwardError, KvLayerIndex, ModelConfig, ModelLoadError, Weights};
use ops::{AttentionKeyRange, AttentionLayerParams, QkNormRopeParams, Tensor};

/// Attention of a decoder layer: `x += o_proj(softmax(rope(q) · rope(k)ᵀ · scale) · v)`, where `q`, `k` and
/// `v` are projections of `norm(x)`, and `scale` is `ModelConfig::softmax_scale`. If the model has a QK norm,
/// it is applied to `q` and `k` before RoPE. If the model has an attention temperature, `q` is multiplied by
/// the factor of its position. If the model has output gates, the attention output is multiplied by their sigmoid. If
/// the model has a value norm, it is applied to `v`. A layer without keys and values of its own reads those of an earlier
/// layer.
#[derive(Debug)]
pub(crate) struct GqaAttention {
    qkv_proj: ColumnParallelLinear,
    full_norm: Option<FullQkNorm>,
    heads: GqaAttentionCore,
}

/// GQA after the QKV projection: QK norm, RoPE, KV write, attention and output projection. The input is
/// `[tokens, (query heads + 2 · KV heads) · head_dim]`.
#[derive(Debug)]
pub(crate) struct GqaAttentionCore {
    norm: Option<QkNorm>,
    value_norm: Option<ValueNorm>,
    /// Whether the layer computes keys and values, instead of reading those of an earlier layer.
    has_keys: bool,
    rope: RotaryEmbedding,
    shape: AttentionLayerParams<'static>,
    /// Attention sinks of this rank's query heads, f32 `[heads]`.
    sinks: Option<Tensor>,
    /// Number of query channels of this rank.
    query_channels: usize,
    /// Whether the last channels of the QKV projection are gates of the attention output.
    has_output_gate: bool,
    kv_scales: LayerKvScales,
    o_proj: RowParallelLinear,
}

/// RMS norms that are applied to each head of queries and keys.
#[derive(Debug)]
struct QkNorm {
    q: Tensor, // [head_dim]
    /// `None` if the layer has no keys of its own.
    k: Option<Tensor>, // [head_dim]
    eps: f32,
}

/// RMS norm without weights of each value head.
#[derive(Debug)]
struct ValueNorm {
    /// First value channel of the QKV projection.
    first: usize,
    /// Number of value heads of this rank, and channels per head.
    heads: [usize; 2],
    eps: f32,
}

impl QkNorm {
    /// Loads the norms of an attention layer; `None` if the architecture has no QK norm per head.
    fn load(config: &ModelConfig, w: &Weights<'_>) -> Result<Option<Self>, ModelLoadError> {
        if !config.qk_norm() {
            return Ok(None);
        }
        let q = w.norm_vector("q_norm.weight")?;
        let has_keys = config.kv_projection != KvProjectionKind::Absent;
        let k = has_keys.then(|| w.norm_vector("k_norm.weight")).transpose()?;
        Ok(Some(Self { q, k, eps: config.rms_eps }))
    }
}

impl GqaAttention {
    /// Loads the attention of layer `layer`: a decoder layer, or an MTP module after the decoder layers.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let config = &*config.at_layer(layer);
        let qkv_proj = ColumnParallelLinear::load_qkv(w, config)?;
        let full_norm = FullQkNorm::load(config, w)?;
        let heads = GqaAttentionCore::load(config, w, rope, layer)?;
        Ok(Self { qkv_proj, full_norm, heads })
    }

    /// Updates the residual stream `x`. If `logits_indices`, i32 `[rows]`, are given, only the rows of the
    /// tokens at these indices remain in the stream afterwards.
    pub(crate) fn forward<'a>(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norms: impl Into<SublayerNormRefs<'a>>,
        logits_indices: Option<&Tensor>,
    ) -> Result<(), ForwardError> {
        let norms = norms.into();
        let mut qkv = self.project(f, x, norms.input)?; // [tokens, q + k + v channels]
        let heads = &self.heads;
        let mut o = heads.attention(f, &mut qkv)?; // [tokens, query channels]
        if heads.has_output_gate {
            f.ops.sigmoid_gating(&mut o, &qkv)?;
        }
        if let Some(rows) = logits_indices {
            x.retain_rows(f, rows)?; // [rows, hidden size]
            o = f.ops.gather_rows(&o, rows)?; // [rows, query channels]
        }
        heads.o_proj.add_to(f, x, &o, norms.output) // [tokens or rows, hidden size]; all-reduced over f.tp
    }

    /// Writes the keys and values of the tokens in `x` to the KV cache; the content of `x` is undefined afterwards.
    pub(crate) fn write_kv_only(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: &RmsNormLayer,
    ) -> Result<(), ForwardError> {
        let qkv = self.project(f, x, Some(norm))?;
        self.heads.write_kv(f, &qkv).map(drop)
    }

    /// Projects `norm(x)` to queries, keys, values and gates, and applies norms over all heads and the temperature.
    fn project(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        norm: Option<&RmsNormLayer>,
    ) -> Result<Tensor, ForwardError> {
        let mut qkv = self.qkv_proj.forward(f, x, norm)?;
        if let Some(norm) = &self.full_norm {
            norm.apply(f, &mut qkv)?;
        }
        if let Some(factors) = &self.heads.rope.temperature {
            let query_channels = self.heads.query_channels;
            f.ops.attention_temperature(&mut qkv, factors, query_channels, f.batch)?;
        }
        Ok(qkv)
    }
}

impl GqaAttentionCore {
    /// Loads the QK norm, RoPE tables and output projection of layer `layer`.
    pub(crate) fn load(
        config: &ModelConfig,
        w: &Weights<'_>,
        rope: &RotaryEmbedding,
        layer: usize,
    ) -> Result<Self, ModelLoadError> {
        let heads = w.ranks().query_heads(config);
        let heads = heads.map_err(|e| w.split("q_proj", e))?.len();
        let kv_heads = w.ranks().kv_heads(config).map_err(|e| w.split("k_proj", e))?.len();
        // Keys and values have the scales of the layer that stores them.
        let source = config.kv_source(layer);
        let of_source = (source != layer).then(|| w.at_layer(source).at("self_attn"));
        let kv_scales = LayerKvScales::load(config, of_source.as_ref().unwrap_or(w))?;
        let factors = kv_scales.output_factors();
        let o_proj = RowParallelLinear::load_scaled(w, "o_proj", config.out_bias, factors)?;
        // A window that is not shorter than any context has no effect.
        let window = config.window_at(layer).filter(|window| *window < w.positions());
        let scale = config.softmax_scale() * kv_scales.softmax_factor();
        let KvLayerIndex { group, layer: pool_layer } = w.kv_layer(layer);
        let has_keys = config.kv_projection != KvProjectionKind::Absent;
        let value_norm = ValueNorm {
            first: (heads + kv_heads) * config.head_dim,
            heads: [kv_heads, config.head_dim],
            eps: config.rms_eps,
        };
        Ok(Self {
            norm: QkNorm::load(config, w)?,
            value_norm: (config.value_norm() && has_keys).then_some(value_norm),
            has_keys,
            rope: rope.at_layer(layer),
            shape: AttentionLayerParams {
                heads,
                group,
                layer: pool_layer,
                scale,
                keys: AttentionKeyRange {
                    // MTP modules have no KV at position 0.
                    first_position: usize::from(layer >= config.layers),
                    window,
                },
                sinks: None,
            },
            sinks: config.has_sinks().then(|| w.vector_f32("sinks")).transpose()?,
            query_channels: heads * config.head_dim,
            has_output_gate: config.has_output_gate(),
            kv_scales,
            o_proj,
        })
    }

    /// Computes the attention of `qkv [tokens, query, key and value channels]`; returns `[tokens, query channels]`.
    fn attention(&self, f: &ForwardContext<'_>, qkv: &mut Tensor) -> Result<Tensor, ForwardError> {
        let (ops, weights, shape) = (f.ops, self.weights(), self.shape());
        if !self.has_keys {
            let q = ops.q_norm_rope(qkv, &weights, &shape, f.kv, f.batch)?;
            return Ok(ops.paged_attention(&q, &shape, f.kv, f.batch)?);
        }
        if let Some(ValueNorm { first, heads, eps }) = &self.value_norm {
            ops.value_head_norm(qkv, *first, *heads, *eps)?;
        }
        Ok(ops.rope_attention(qkv, &weights, &shape, f.kv, f.batch)?)
    }

    /// Computes the attention of an EAGLE-3 draft model. A draft model has no KV at position 0, so attention
    /// starts at position 1.
    pub(crate) fn forward_skipping_first(
        &self,
        f: &ForwardContext<'_>,
        x: &mut ResidualStream,
        qkv: &Tensor,
    ) -> Result<(), ForwardError> {
        let q = self.write_kv(f, qkv)?; // [tokens, query channels]
        let keys = AttentionKeyRange { first_position: 1, ..self.shape.keys };
        let shape = AttentionLayerParams { keys, ..self.shape() };
        let o = f.ops.paged_attention(&q, &shape, f.kv, f.batch)?; // [tokens, query channels]
        self.o_proj.add_to(f, x, &o, None) // [tokens, hidden size]; all-reduced over f.tp
    }

    /// Writes keys and values to the KV cache and returns the queries `[tokens, query channels]` after RoPE.
    pub(crate) fn write_kv(
        &self,
        f: &ForwardContext<'_>,
        qkv: &Tensor,
    ) -> Result<Tensor, ForwardError> {
        let (ops, weights) = (f.ops, self.weights());
        Ok(ops.qk_norm_rope_kv_write(qkv, &weights, &self.shape, f.kv, f.batch)?)
    }

    fn shape(&self) -> AttentionLayerParams<'_> {
        AttentionLayerParams { sinks: self.sinks.as_ref(), ..self.shape }
    }

    fn weights(&self) -> QkNormRopeParams<'_> {
        let norm = self.norm.as_ref();
        QkNormRopeParams {
            q_norm: norm.map(|n| &n.q),
            k_norm: norm.map(|n| n.k.as_ref().unwrap_or(&n.q)),
            eps: norm.map_or(0.0, |n| n.eps),
            rope: &self.rope.table,
            kv_scales: self.kv_scales.scaling(),
        }
    }
}
