//! Paged attention of grouped-query heads (GQA). Legend: T tokens, N query heads, D head size.

use device::{Buffer, DType, DeviceError, MatMut, check_dtype, check_size};

use crate::{AttentionMetadata, KvLayout, PagedAttentionArgs, QkNormRopeArgs};

/// `q = rope(norm(q))`; `rope(norm(k))` and `v` are written to the KV pool by slot.
#[derive(Debug)]
pub struct QkNormRopeKvWrite<'a> {
    /// `[T, N D]`
    pub q: MatMut<'a>,
    /// KV pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a KvLayout,
    /// Projections, norms, rotation and slots.
    pub args: &'a QkNormRopeArgs<'a>,
}

/// `o = softmax(scale q kᵀ) v` over the keys at or before the position of each query.
#[derive(Debug)]
pub struct PagedAttention<'a> {
    /// `[T, N D]`
    pub o: MatMut<'a>,
    /// KV pool.
    pub pool: &'a Buffer,
    /// Layout of `pool`.
    pub layout: &'a KvLayout,
    /// Queries, rows, tables and scale.
    pub args: &'a PagedAttentionArgs<'a>,
}

/// [`QkNormRopeKvWrite`], then [`PagedAttention`] of its queries, in one launch, for rows of one token each.
/// GPU only; see [`RopeAttention::supports`].
#[derive(Debug)]
pub struct RopeAttention<'a> {
    /// `[T, N D]`
    pub o: MatMut<'a>,
    /// KV pool.
    pub pool: &'a mut Buffer,
    /// Layout of `pool`.
    pub layout: &'a KvLayout,
    /// Projections, norms, rotation and slots.
    pub qk: &'a QkNormRopeArgs<'a>,
    /// Rows of one token each.
    pub rows: &'a AttentionMetadata<'a>,
    /// Factor of the scores.
    pub scale: f32,
}

impl QkNormRopeKvWrite<'_> {
    /// Rejects shapes and types that contradict each other.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        check_layer("qk_norm_rope_kv_write", self.pool, self.layout, self.args.layer)?;
        self.args.check("qk_norm_rope_kv_write", &self.q, self.layout)
    }
}

impl PagedAttention<'_> {
    /// Rejects shapes and types that contradict each other.
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
        if !args.heads.is_multiple_of(layout.kv_heads) {
            return check_size(kernel, "query heads", args.heads, layout.kv_heads);
        }
        Ok(())
    }
}

impl QkNormRopeArgs<'_> {
    /// Rejects shapes and types that contradict each other; the columns of `q` are those of all query heads.
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
        for norm in [self.q_norm, self.k_norm].into_iter().flatten() {
            size("norm weight", norm.cols(), dim)?;
            check_dtype(kernel, "norm weight", norm.dtype(), q.dtype())?;
        }
        Ok(())
    }
}

/// Rejects a layer index outside the pool, and a pool of too few bytes.
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
