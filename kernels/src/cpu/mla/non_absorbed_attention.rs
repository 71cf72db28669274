//! Non-absorbed MLA on the CPU: the keys and values of several heads at a time are up-projected from the
//! compressed KV of a row into a temporary KV pool, which ordinary attention reads.

use std::ops::Range;

use device::{DeviceDriver, DeviceError, FloatElement, MatMut, MatRef};

use super::CpuMlaArgs;
use crate::cpu::CpuBackend;
use crate::{
    AttentionKeyRange, AttentionMetadata, BatchRowLengths, BatchUpperBounds, KvCacheScales,
    KvLayout, KvTileOrder, Linear, PagedAttention, PagedAttentionArgs, QkNormRopeArgs,
    QkNormRopeKvWrite, RopeCosSin,
};

/// Maximum size of the temporary KV pool in bytes, which limits how many heads are up-projected at a time. A
/// single head may exceed it.
const UP_PROJECTED_KV_BYTES: usize = 64 << 20;
/// Number of positions per block of the temporary KV pool.
const BLOCK_TOKENS: usize = 64;
/// Granularity of the head size in ordinary attention: heads are padded to a multiple of this size with
/// zeros, which do not change any sum.
const HEAD_UNIT: usize = 16;

impl CpuBackend {
    /// Computes the output of row `row`, several heads at a time.
    pub(super) fn attend_mla_non_absorbed<T: FloatElement>(
        &self,
        o: &mut MatMut<'_>,
        call: &CpuMlaArgs<'_, '_>,
        row: usize,
    ) -> Result<(), DeviceError> {
        let context = call.context(row);
        let dim = call.qk_head_dim().max(call.value_dim).next_multiple_of(HEAD_UNIT);
        let bytes_per_head = context.next_multiple_of(BLOCK_TOKENS) * 2 * dim * T::DTYPE.bytes();
        let heads_at_once =
            (UP_PROJECTED_KV_BYTES / bytes_per_head.max(1)).clamp(1, call.heads.max(1));
        let compressed_kv = gather_compressed_kv::<T>(call, row);
        for first in (0..call.heads).step_by(heads_at_once) {
            let heads = first..(first + heads_at_once).min(call.heads);
            let kv = self.up_project_kv(call, &compressed_kv, row, dim, heads.clone())?;
            self.attend_heads::<T>(o, call, row, dim, heads, &kv)?;
        }
        Ok(())
    }

    /// Up-projects the keys, then the values, of `heads` at every visible position of a row, each head padded
    /// to size `dim`. Returns `[context, 2 · heads · dim]`.
    fn up_project_kv<T: FloatElement>(
        &self,
        call: &CpuMlaArgs<'_, '_>,
        compressed_kv: &[T],
        row: usize,
        dim: usize,
        heads: Range<usize>,
    ) -> Result<Vec<T>, DeviceError> {
        let (context, rank) = (call.context(row), call.layout.kv_lora_rank);
        let (width, values) = (2 * heads.len() * dim, heads.len() * dim);
        let x = MatRef::of(compressed_kv, context, rank)?;
        let mut all = vec![T::store(0.0); context * width];
        let mut projected = vec![T::store(0.0); context * call.nope_dim.max(call.value_dim)];
        for (i, head) in heads.enumerate() {
            for (group, at) in
                [(call.args.heads.w_uk, i * dim), (call.args.heads.w_uv, values + i * dim)]
            {
                let n = group.n();
                let y = MatMut::of(&mut projected[..context * n], context, n)?;
                self.run(Linear { y, x, weight: group.get(head), bias: None })?;
                for (to, from) in all.chunks_exact_mut(width).zip(projected.chunks_exact(n.max(1)))
                {
                    to[at..at + n].copy_from_slice(from);
                }
            }
            copy_rope_keys(call, row, &mut all, width, i * dim + call.nope_dim);
        }
        Ok(all)
    }

    /// Computes attention of `heads` over their up-projected keys and values `kv`, padded to head size `dim`.
    fn attend_heads<T: FloatElement>(
        &self,
        o: &mut MatMut<'_>,
        call: &CpuMlaArgs<'_, '_>,
        row: usize,
        dim: usize,
        heads: Range<usize>,
        kv: &[T],
    ) -> Result<(), DeviceError> {
        let (context, count) = (call.context(row), heads.len());
        let layout = KvLayout {
            layers: 1,
            blocks: context.div_ceil(BLOCK_TOKENS),
            block_tokens: BLOCK_TOKENS,
            kv_heads: count,
            head_dim: dim,
            dtype: T::DTYPE,
            order: KvTileOrder::LaneInterleaved,
        };
        let mut pool = self.alloc(layout.bytes())?;
        let (slots, positions): (Vec<i64>, Vec<i32>) =
            ((0..context as i64).collect(), vec![0; context]);
        let rope =
            RopeCosSin { cos: MatRef::of::<f32>(&[], 1, 0)?, sin: MatRef::of::<f32>(&[], 1, 0)? };
        let write_args = QkNormRopeArgs {
            qkv: MatRef::of(kv, context, 2 * count * dim)?,
            q_norm: None,
            k_norm: None,
            eps: 0.0,
            rope,
            positions: MatRef::of(&positions, 1, context)?,
            slots: MatRef::of(&slots, 1, context)?,
            heads: 0,
            layer: 0,
            kv_scales: KvCacheScales::UNIT,
        };
        let no_queries = MatMut::of::<T>(&mut [], context, 0)?;
        self.run(QkNormRopeKvWrite {
            q: no_queries,
            pool: &mut pool,
            layout: &layout,
            args: &write_args,
        })?;

        let (from, to) = call.args.rows.tokens(row);
        let tokens = to - from;
        let mut q = vec![T::store(0.0); tokens * count * dim];
        for (t, padded) in q.chunks_exact_mut((count * dim).max(1)).enumerate() {
            let queries = &call.args.q.row::<T>(from + t)[heads.start * call.qk_head_dim()..];
            for (to, from) in
                padded.chunks_exact_mut(dim).zip(queries.chunks_exact(call.qk_head_dim()))
            {
                to[..from.len()].copy_from_slice(from);
            }
        }
        let table: Vec<i32> = (0..layout.blocks as i32).collect();
        let (cu_q, lens) = ([0, tokens as i32], [context as i32]);
        let rows = AttentionMetadata {
            cu_q: MatRef::of(&cu_q, 1, 2)?,
            context_lens: MatRef::of(&lens, 1, 1)?,
            block_tables: MatRef::of(&table, 1, table.len())?,
            table_rows: None,
            bounds: BatchUpperBounds::of([BatchRowLengths { tokens, context }], 1),
        };
        let q_mat = MatRef::of(&q, tokens, count * dim)?;
        let args = PagedAttentionArgs {
            q: q_mat,
            rows,
            heads: count,
            layer: 0,
            scale: call.args.scale,
            keys: AttentionKeyRange::default(),
            sinks: None,
        };
        let mut out = vec![T::store(0.0); tokens * count * dim];
        self.run(PagedAttention {
            o: MatMut::of(&mut out, tokens, count * dim)?,
            pool: &pool,
            layout: &layout,
            args: &args,
        })?;
        for (t, padded) in out.chunks_exact((count * dim).max(1)).enumerate() {
            let outputs = &mut o.row_mut::<T>(from + t)[heads.start * call.value_dim..];
            for (to, from) in outputs.chunks_exact_mut(call.value_dim).zip(padded.chunks_exact(dim))
            {
                to.copy_from_slice(&from[..call.value_dim]);
            }
        }
        Ok(())
    }
}

/// Copies the key channels with RoPE, which all heads share, of every visible position of a row to the rows
/// of `kv [context, width]`, from column `column` on.
fn copy_rope_keys<T: FloatElement>(
    call: &CpuMlaArgs<'_, '_>,
    row: usize,
    kv: &mut [T],
    width: usize,
    column: usize,
) {
    let table = call.args.rows.table(row);
    for (position, to) in kv.chunks_exact_mut(width).enumerate() {
        let rope_key = &call.row::<T>(table, position)[call.layout.kv_lora_rank..];
        to[column..][..rope_key.len()].copy_from_slice(rope_key);
    }
}

/// Gathers the compressed KV of a row in order of position, `[context, kv_lora_rank]`.
fn gather_compressed_kv<T: FloatElement>(call: &CpuMlaArgs<'_, '_>, row: usize) -> Vec<T> {
    let (context, table) = (call.context(row), call.args.rows.table(row));
    let compressed_kv = |position| &call.row::<T>(table, position)[..call.layout.kv_lora_rank];
    (0..context).flat_map(compressed_kv).copied().collect()
}
