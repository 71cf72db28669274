//! Expanded: keys and values of some heads at a time are made of a row's latents and laid into a pool of their own, which
//! ordinary attention reads.

use std::ops::Range;

use super::super::device::CpuDevice;
use super::Call;
use crate::dtype::Float;
use crate::{
    Attention, BatchRows, DeviceError, Driver, KvLayout, KvOrder, Mat, MatMut, QkRope, Rope,
    RowBounds,
};

/// Bytes of keys and values that are made at a time, at most, unless those of one head are more.
const EXPANDED_BYTES: usize = 64 << 20;
/// Positions of a block of the pool they are laid into.
const BLOCK_TOKENS: usize = 64;
/// Channels that ordinary attention takes heads by; zeros fill them up, which change no sum.
const HEAD_UNIT: usize = 16;

impl CpuDevice {
    /// Output of row `row`, for some heads at a time.
    pub(super) fn attend_expanded<T: Float>(
        &self,
        o: &mut MatMut<'_>,
        call: &Call<'_, '_>,
        row: usize,
    ) -> Result<(), DeviceError> {
        let context = call.context(row);
        let dim = call.query().max(call.values).next_multiple_of(HEAD_UNIT);
        let bytes_per_head = context.next_multiple_of(BLOCK_TOKENS) * 2 * dim * T::DTYPE.bytes();
        let together = (EXPANDED_BYTES / bytes_per_head.max(1)).clamp(1, call.heads.max(1));
        let latents = latents::<T>(call, row);
        for first in (0..call.heads).step_by(together) {
            let heads = first..(first + together).min(call.heads);
            let expanded = self.expand(call, &latents, (row, dim), heads.clone())?;
            self.attend_heads::<T>(o, call, (row, dim), heads, &expanded)?;
        }
        Ok(())
    }

    /// Keys, then values, of `heads` at every position of a row: `[context, 2 heads D]`.
    fn expand<T: Float>(
        &self,
        call: &Call<'_, '_>,
        latents: &[T],
        (row, dim): (usize, usize),
        heads: Range<usize>,
    ) -> Result<Vec<T>, DeviceError> {
        let (context, latent) = (call.context(row), call.layout.latent);
        let (width, values) = (2 * heads.len() * dim, heads.len() * dim);
        let x = Mat::of(latents, context, latent)?;
        let mut all = vec![T::store(0.0); context * width];
        let mut made = vec![T::store(0.0); context * call.unturned.max(call.values)];
        for (i, head) in heads.enumerate() {
            for (group, at) in
                [(call.args.heads.key, i * dim), (call.args.heads.value, values + i * dim)]
            {
                let n = group.n();
                let y = MatMut::of(&mut made[..context * n], context, n)?;
                self.linear_rows(y, x, group.get(head), None)?;
                for (to, from) in all.chunks_exact_mut(width).zip(made.chunks_exact(n.max(1))) {
                    to[at..at + n].copy_from_slice(from);
                }
            }
            let table = call.args.rows.table(row);
            for (position, to) in all.chunks_exact_mut(width).enumerate() {
                let turned = &call.row::<T>(table, position)[latent..];
                to[i * dim + call.unturned..][..turned.len()].copy_from_slice(turned);
            }
        }
        Ok(all)
    }

    /// Attention of `heads` over what was made for them.
    fn attend_heads<T: Float>(
        &self,
        o: &mut MatMut<'_>,
        call: &Call<'_, '_>,
        (row, dim): (usize, usize),
        heads: Range<usize>,
        expanded: &[T],
    ) -> Result<(), DeviceError> {
        let (context, count) = (call.context(row), heads.len());
        let layout = KvLayout {
            layers: 1,
            blocks: context.div_ceil(BLOCK_TOKENS),
            block_tokens: BLOCK_TOKENS,
            kv_heads: count,
            head_dim: dim,
            dtype: T::DTYPE,
            order: KvOrder::Lanes,
        };
        let mut pool = self.alloc(layout.bytes())?;
        let (slots, positions): (Vec<i64>, Vec<i32>) =
            ((0..context as i64).collect(), vec![0; context]);
        let rope = Rope { cos: Mat::of::<f32>(&[], 1, 0)?, sin: Mat::of::<f32>(&[], 1, 0)? };
        let stored = QkRope {
            qkv: Mat::of(expanded, context, 2 * count * dim)?,
            q_norm: None,
            k_norm: None,
            eps: 0.0,
            rope,
            positions: Mat::of(&positions, 1, context)?,
            slots: Mat::of(&slots, 1, context)?,
            heads: 0,
            layer: 0,
            kv_scales: [1.0; 2],
        };
        let no_queries = MatMut::of::<T>(&mut [], context, 0)?;
        self.rope_and_store(no_queries, (&mut pool, &layout), &stored)?;

        let (from, to) = call.args.rows.tokens(row);
        let tokens = to - from;
        let mut q = vec![T::store(0.0); tokens * count * dim];
        for (t, padded) in q.chunks_exact_mut((count * dim).max(1)).enumerate() {
            let own = &call.args.q.row::<T>(from + t)[heads.start * call.query()..];
            for (to, from) in padded.chunks_exact_mut(dim).zip(own.chunks_exact(call.query())) {
                to[..from.len()].copy_from_slice(from);
            }
        }
        let table: Vec<i32> = (0..layout.blocks as i32).collect();
        let (cu_q, lens) = ([0, tokens as i32], [context as i32]);
        let rows = BatchRows {
            cu_q: Mat::of(&cu_q, 1, 2)?,
            context_lens: Mat::of(&lens, 1, 1)?,
            block_tables: Mat::of(&table, 1, table.len())?,
            table_rows: None,
            bounds: RowBounds::of([(tokens, context)], 1),
        };
        let q_mat = Mat::of(&q, tokens, count * dim)?;
        let args =
            Attention { q: q_mat, rows, heads: count, layer: 0, scale: call.args.scale, first: 0 };
        let mut out = vec![T::store(0.0); tokens * count * dim];
        self.attend(MatMut::of(&mut out, tokens, count * dim)?, (&pool, &layout), &args)?;
        for (t, padded) in out.chunks_exact((count * dim).max(1)).enumerate() {
            let own = &mut o.row_mut::<T>(from + t)[heads.start * call.values..];
            for (to, from) in own.chunks_exact_mut(call.values).zip(padded.chunks_exact(dim)) {
                to.copy_from_slice(&from[..call.values]);
            }
        }
        Ok(())
    }
}

/// The latents of a row in order of position: `[context, C]`.
fn latents<T: Float>(call: &Call<'_, '_>, row: usize) -> Vec<T> {
    let (context, table) = (call.context(row), call.args.rows.table(row));
    let latent = |position| &call.row::<T>(table, position)[..call.layout.latent];
    (0..context).flat_map(latent).copied().collect()
}
