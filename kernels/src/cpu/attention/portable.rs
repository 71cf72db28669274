//! One query at a time in plain Rust: the reference of the vector paths.

use super::super::maths::exp;
use super::KEY_TILE;
use crate::dtype::Float;
use crate::{Attention, Buffer, KvLayout};

/// One head of one token.
pub(super) struct Query {
    pub(super) row: usize,
    pub(super) token: usize,
    pub(super) head: usize,
    /// Keys at or before the token's position.
    pub(super) visible: usize,
}

/// Writes the attention output of one query to `y`.
pub(super) fn attend<T: Float>(
    y: &mut [T],
    kv: &Buffer,
    layout: &KvLayout,
    args: &Attention<'_>,
    query: &Query,
) {
    let dim = layout.head_dim;
    let kv_head = query.head / (args.heads / layout.kv_heads);
    let table = args.rows.block_tables.row::<i32>(query.row);
    // SAFETY: `check` saw that the buffer holds the whole layout.
    let pool = unsafe {
        std::slice::from_raw_parts(kv.as_ptr().cast::<T>(), layout.bytes() / T::DTYPE.bytes())
    };
    let place = |position: usize| {
        (table[position / layout.block_tokens] as usize, position % layout.block_tokens)
    };
    let q = &args.q.row::<T>(query.token)[query.head * dim..][..dim];
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0f32);
    let mut out = vec![0.0f32; dim];
    for start in (0..query.visible).step_by(KEY_TILE) {
        let keys = KEY_TILE.min(query.visible - start);
        let mut scores = [0.0f32; KEY_TILE];
        for (i, score) in scores[..keys].iter_mut().enumerate() {
            let (block, t) = place(start + i);
            let tile = layout.key_tile(args.layer, block, kv_head);
            for (d, q) in q.iter().enumerate() {
                *score += q.load() * pool[tile + layout.key(t, d)].load();
            }
            *score *= args.scale;
        }
        let tile_max = scores[..keys].iter().copied().fold(max, f32::max);
        let keep = exp(max - tile_max);
        max = tile_max;
        sum *= keep;
        for o in &mut out {
            *o *= keep;
        }
        for (i, score) in scores[..keys].iter().enumerate() {
            let p = T::store(exp(score - max)).load();
            sum += p;
            let (block, t) = place(start + i);
            let tile = layout.value_tile(args.layer, block, kv_head);
            for (d, o) in out.iter_mut().enumerate() {
                *o += p * pool[tile + layout.value(t, d)].load();
            }
        }
    }
    for (y, o) in y.iter_mut().zip(&out) {
        *y = T::store(if sum > 0.0 { o / sum } else { 0.0 });
    }
}
