//! Paged attention of grouped-query heads (GQA). Legend: T tokens, N query heads, D head size.

use device::{Buffer, MatMut};

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

/// [`QkNormRopeKvWrite`], then [`PagedAttention`] of its queries, in one launch, for rows of one token each. GPU only; see
/// [`RopeAttention::supports`].
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
