//! Ops of grouped-query attention (GQA) with a paged KV pool.

use device::{Buffer, DType, DeviceError, MatMut, MatRef, check_dtype, check_size};

use super::check_norm_dtype;
use crate::{
    AttentionKeyRange, AttentionMetadata, KvCacheScales, KvLayout, PagedAttentionArgs,
    QkNormRopeArgs,
};

/// Computes `q = rope(norm(q))`, and writes `rope(norm(k))` and `v` to the KV pool at the slot of each token.
#[derive(Debug)]
pub struct QkNormRopeKvWrite<'a> {
    /// Queries after norm and RoPE, `[tokens, heads · head_dim]`.
    pub q: MatMut<'a>,
    /// KV pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`. With 0 KV heads, only queries are computed.
    pub layout: &'a KvLayout,
    /// QKV projections, norm weights, RoPE tables and KV slots.
    pub args: &'a QkNormRopeArgs<'a>,
}

/// RMS norm without weights of each value head of a QKV projection, `v = v / sqrt(mean(v²) + eps)`, in place (Gemma 4,
/// transformers `modeling_gemma4.py`).
#[derive(Debug)]
pub struct ValueHeadNorm<'a> {
    /// QKV projections `[tokens, channels]`, of which only the value channels change.
    pub qkv: MatMut<'a>,
    /// First channel of the values.
    pub first: usize,
    /// Number of value heads.
    pub heads: usize,
    /// Number of channels of a value head.
    pub head_dim: usize,
    /// Epsilon, added to the mean square.
    pub eps: f32,
}

/// `o = softmax(scale q kᵀ) v` over the keys at or before the position of each query.
#[derive(Debug)]
pub struct PagedAttention<'a> {
    /// Attention output, `[tokens, heads · head_dim]`.
    pub o: MatMut<'a>,
    /// KV pool.
    pub pool: &'a Buffer,
    /// Layout of `pool`.
    pub layout: &'a KvLayout,
    /// Queries, batch metadata and scale.
    pub args: &'a PagedAttentionArgs<'a>,
}

/// Runs [`QkNormRopeKvWrite`], then [`PagedAttention`] on the resulting queries, in one launch, for rows of
/// one token each. GPU only; [`RopeAttention::supports`] gives the supported shapes.
#[derive(Debug)]
pub struct RopeAttention<'a> {
    /// Attention output, `[tokens, heads · head_dim]`.
    pub o: MatMut<'a>,
    /// KV pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a KvLayout,
    /// QKV projections, norm weights, RoPE tables and KV slots.
    pub qk: &'a QkNormRopeArgs<'a>,
    /// Batch metadata of rows of one token each.
    pub rows: &'a AttentionMetadata<'a>,
    /// Factor of the attention scores.
    pub scale: f32,
    /// Keys that the queries attend to; `first_position` must be 0.
    pub keys: AttentionKeyRange,
    /// Attention sinks, as in [`PagedAttentionArgs`]. `None` = no sinks.
    pub sinks: Option<MatRef<'a>>,
}

impl QkNormRopeKvWrite<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        if self.layout.kv_heads > 0 {
            check_layer("qk_norm_rope_kv_write", self.pool, self.layout, self.args.layer)?;
        }
        self.args.check("qk_norm_rope_kv_write", &self.q, self.layout)
    }
}

impl ValueHeadNorm<'_> {
    pub(crate) const KERNEL: &'static str = "value_head_norm";

    /// Checks that the value heads are among the channels.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let end = self.first + self.heads * self.head_dim.max(1);
        check_size(Self::KERNEL, "channels", self.qkv.cols().min(end), end)
    }
}

impl PagedAttention<'_> {
    /// Checks that shapes and types agree.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let (kernel, o, layout, args) = ("paged_attention", &self.o, self.layout, self.args);
        check_layer(kernel, self.pool, layout, args.layer)?;
        check_size(kernel, "columns of q", args.q.cols(), args.heads * layout.head_dim)?;
        check_size(kernel, "rows of o", o.rows(), args.q.rows())?;
        check_size(kernel, "columns of o", o.cols(), args.q.cols())?;
        layout.check_activations(kernel, "q", args.q.dtype())?;
        check_dtype(kernel, "o", o.dtype(), args.q.dtype())?;
        check_dtype(kernel, "cu_q", args.rows.cu_q.dtype(), DType::I32)?;
        check_dtype(kernel, "context_lens", args.rows.context_lens.dtype(), DType::I32)?;
        check_dtype(kernel, "block_tables", args.rows.block_tables.dtype(), DType::I32)?;
        let table_rows = args.rows.table_rows.map_or(DType::I32, |rows| rows.dtype());
        check_dtype(kernel, "table_rows", table_rows, DType::I32)?;
        check_key_range(kernel, args.keys, args.sinks, args.heads)?;
        if !args.heads.is_multiple_of(layout.kv_heads) {
            return check_size(kernel, "query heads", args.heads, layout.kv_heads);
        }
        Ok(())
    }
}

impl QkNormRopeArgs<'_> {
    /// Checks that shapes and types agree; `q` has the columns of all query heads.
    pub(crate) fn check(
        &self,
        kernel: &'static str,
        q: &MatMut<'_>,
        layout: &KvLayout,
    ) -> Result<(), DeviceError> {
        let (tokens, dim) = (self.qkv.rows(), layout.head_dim);
        let size = |what, got, expected| check_size(kernel, what, got, expected);
        size("columns of qkv", self.qkv.cols(), (self.heads + 2 * layout.kv_heads) * dim)?;
        size("rows of q", q.rows(), tokens)?;
        size("columns of q", q.cols(), self.heads * dim)?;
        size("positions", self.positions.cols(), tokens)?;
        size("slots", self.slots.cols(), tokens)?;
        size("columns of sin", self.rope.sin.cols(), self.rope.cos.cols())?;
        size("rows of sin", self.rope.sin.rows(), self.rope.cos.rows())?;
        size("rotary channels", (2 * self.rope.cos.cols()).max(dim), dim)?;
        layout.check_activations(kernel, "qkv", self.qkv.dtype())?;
        for (what, got, expected) in [
            ("q", q.dtype(), self.qkv.dtype()),
            ("cos", self.rope.cos.dtype(), DType::F32),
            ("sin", self.rope.sin.dtype(), DType::F32),
            ("positions", self.positions.dtype(), DType::I32),
            ("slots", self.slots.dtype(), DType::I64),
        ] {
            check_dtype(kernel, what, got, expected)?;
        }
        self.check_head_factors(kernel, layout)?;
        self.check_norm_weights(kernel, dim, q.dtype())
    }

    fn check_head_factors(
        &self,
        kernel: &'static str,
        layout: &KvLayout,
    ) -> Result<(), DeviceError> {
        let KvCacheScales::Heads(factors) = self.kv_scales else { return Ok(()) };
        let heads = self.heads + 2 * layout.kv_heads;
        check_dtype(kernel, "KV pool with factors of heads", layout.dtype, DType::F8E4M3)?;
        check_dtype(kernel, "factors of heads", factors.dtype(), DType::F32)?;
        check_size(kernel, "factors of heads", factors.cols(), heads)
    }

    fn check_norm_weights(
        &self,
        kernel: &'static str,
        head_dim: usize,
        dtype: DType,
    ) -> Result<(), DeviceError> {
        for norm in [self.q_norm, self.k_norm].into_iter().flatten() {
            check_size(kernel, "norm weight", norm.cols(), head_dim)?;
            check_norm_dtype(kernel, "norm weight", norm.dtype(), dtype)?;
        }
        match (self.q_norm, self.k_norm) {
            (Some(q), Some(k)) => check_dtype(kernel, "key norm weight", k.dtype(), q.dtype()),
            _ => Ok(()),
        }
    }
}

/// Checks that a window has a key, and that there is a sink in f32 for each of `heads` query heads if there are
/// sinks.
pub(crate) fn check_key_range(
    kernel: &'static str,
    keys: AttentionKeyRange,
    sinks: Option<MatRef<'_>>,
    heads: usize,
) -> Result<(), DeviceError> {
    if keys.window == Some(0) {
        return check_size(kernel, "window", 0, 1);
    }
    let Some(sinks) = sinks else { return Ok(()) };
    check_dtype(kernel, "sinks", sinks.dtype(), DType::F32)?;
    check_size(kernel, "sinks", sinks.cols(), heads)
}

/// Checks that the layer index is inside the KV pool and that `pool` is as large as its layout.
pub(crate) fn check_layer(
    kernel: &'static str,
    pool: &Buffer,
    layout: &KvLayout,
    layer: usize,
) -> Result<(), DeviceError> {
    layout.check()?;
    check_size(kernel, "pool bytes", pool.bytes().min(layout.bytes()), layout.bytes())?;
    if layer >= layout.layers {
        let (what, index, limit) = ("layer", layer as i64, layout.layers);
        return Err(DeviceError::Index { kernel, what, index, limit });
    }
    Ok(())
}
