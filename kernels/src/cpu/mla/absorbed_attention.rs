//! Absorbed MLA on the CPU: W_UK is absorbed into the queries, all heads read one compressed KV row per
//! token, and W_UV maps the attention-weighted mean of the compressed KV to the output of each head.

use device::{DeviceError, FloatElement, MatMut, MatRef};

use super::super::maths::exp;
use super::super::row_kernel::{RowKernel, dispatch};
use super::super::shared_rows::SharedRows;
use super::CpuMlaArgs;
use crate::cpu::CpuBackend;
use crate::{Linear, PackedMatrixGroup};

/// Number of positions per key tile.
const KEY_TILE: usize = 64;
/// Number of running sums (SIMD lanes) of a dot product.
const LANES: usize = 16;

/// A query token and the keys that it attends to.
#[derive(Clone, Copy)]
struct QueryToken {
    row: usize,
    token: usize,
    /// Number of keys that the token attends to, including the key of the token itself.
    context: usize,
}

impl CpuBackend {
    /// Computes the attention outputs of all tokens of `rows`.
    pub(super) fn attend_mla_absorbed<T: FloatElement>(
        &self,
        o: &mut MatMut<'_>,
        call: &CpuMlaArgs<'_, '_>,
        w_uk_t: &PackedMatrixGroup,
        rows: &[usize],
    ) -> Result<(), DeviceError> {
        let tokens = query_tokens(call, rows);
        let (count, rank, head_dim) = (tokens.len(), call.layout.kv_lora_rank, call.qk_head_dim());
        if count == 0 {
            return Ok(());
        }
        let mut nope_queries = vec![T::store(0.0); count * call.nope_dim];
        let mut values = vec![T::store(0.0); count * call.value_dim];
        // Absorbed queries `[heads][tokens][kv_lora_rank]`: computed for all heads at once, so that all
        // threads have work.
        let mut absorbed_queries = vec![0f32; call.heads * count * rank];
        for (head, absorbed) in absorbed_queries.chunks_exact_mut(count * rank).enumerate() {
            let rows = nope_queries.chunks_exact_mut(call.nope_dim.max(1));
            for (nope_query, token) in rows.zip(&tokens) {
                let q = &call.args.q.row::<T>(token.token)[head * head_dim..];
                nope_query.copy_from_slice(&q[..call.nope_dim]);
            }
            let x = MatRef::of(&nope_queries, count, call.nope_dim)?;
            let y = MatMut::of(absorbed, count, rank)?;
            self.run(Linear { y, x, weight: w_uk_t.get(head), bias: None })?;
        }
        let mut means = vec![T::store(0.0); call.heads * count * rank];
        {
            let mut means = MatMut::of(&mut means, call.heads * count, rank)?;
            let means = SharedRows::<T>::new(&mut means);
            let isa = self.isa();
            self.threads().split(call.heads * count, 1, 2, &|range| {
                let mut sum = vec![0f32; rank];
                for i in range {
                    let (head, token) = (i / count, &tokens[i % count]);
                    let absorbed_query = &absorbed_queries[i * rank..][..rank];
                    let q = &call.args.q.row::<T>(token.token)[head * head_dim + call.nope_dim..];
                    let rope_query = &q[..call.layout.rope_dim];
                    // SAFETY: each row belongs to one thread.
                    let out = unsafe { means.row(i) };
                    dispatch(
                        isa,
                        AbsorbedAttention {
                            call,
                            query: token,
                            absorbed_query,
                            rope_query,
                            sum: &mut sum,
                            out,
                        },
                    );
                }
            });
        }
        for (head, means) in means.chunks_exact(count * rank).enumerate() {
            let x = MatRef::of(means, count, rank)?;
            let y = MatMut::of(&mut values, count, call.value_dim)?;
            self.run(Linear { y, x, weight: call.args.heads.w_uv.get(head), bias: None })?;
            for (value, token) in values.chunks_exact(call.value_dim.max(1)).zip(&tokens) {
                let out = &mut o.row_mut::<T>(token.token)[head * call.value_dim..];
                out[..call.value_dim].copy_from_slice(value);
            }
        }
        Ok(())
    }
}

fn query_tokens(call: &CpuMlaArgs<'_, '_>, rows: &[usize]) -> Vec<QueryToken> {
    let of_row = |&row: &usize| {
        let (from, to) = call.args.rows.tokens(row);
        let context = call.context(row);
        (from..to).map(move |token| QueryToken { row, token, context: context - (to - 1 - token) })
    };
    rows.iter().flat_map(of_row).collect()
}

/// Row kernel: softmax-weighted mean of the compressed KV for one head of one query token.
struct AbsorbedAttention<'a, 'b, T> {
    call: &'a CpuMlaArgs<'a, 'b>,
    query: &'a QueryToken,
    /// Query of the head multiplied by W_UKᵀ, `[kv_lora_rank]`.
    absorbed_query: &'a [f32],
    /// RoPE channels of the query of the head, `[qk_rope_head_dim]`.
    rope_query: &'a [T],
    /// Running weighted sum of the compressed KV, `[kv_lora_rank]`.
    sum: &'a mut [f32],
    /// Weighted mean of the compressed KV, `[kv_lora_rank]`.
    out: &'a mut [T],
}

impl<T: FloatElement> RowKernel for AbsorbedAttention<'_, '_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { call, query, absorbed_query, rope_query, sum, out } = self;
        let table = call.args.rows.table(query.row);
        let rank = call.layout.kv_lora_rank;
        let (mut max, mut total) = (f32::NEG_INFINITY, 0f32);
        sum.fill(0.0);
        for first in (0..query.context).step_by(KEY_TILE) {
            let mut scores = [f32::NEG_INFINITY; KEY_TILE];
            let visible = KEY_TILE.min(query.context - first);
            for (i, score) in scores[..visible].iter_mut().enumerate() {
                let (c, key) = call.row::<T>(table, first + i).split_at(rank);
                let dot_product =
                    dot(c, |i| absorbed_query[i]) + dot(key, |i| rope_query[i].load());
                *score = dot_product * call.args.scale;
            }
            let largest = scores[..visible].iter().copied().fold(max, f32::max);
            let rescale = exp(max - largest);
            max = largest;
            total *= rescale;
            if rescale != 1.0 {
                for s in sum.iter_mut() {
                    *s *= rescale;
                }
            }
            for (i, score) in scores[..visible].iter().enumerate() {
                let weight = exp(score - max);
                total += weight;
                let c = &call.row::<T>(table, first + i)[..rank];
                for (s, c) in sum.iter_mut().zip(c) {
                    *s += weight * c.load();
                }
            }
        }
        for (out, sum) in out.iter_mut().zip(sum) {
            *out = T::store(*sum / total);
        }
    }
}

/// Returns the dot product `Σ x[i] y(i)` in a fixed order: 16 running sums, one for each `i mod 16`, which
/// are then added in order.
#[inline(always)]
fn dot<T: FloatElement>(x: &[T], y: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for (i, chunk) in whole.iter().enumerate() {
        for j in 0..LANES {
            lanes[j] += chunk[j].load() * y(i * LANES + j);
        }
    }
    for (j, x) in rest.iter().enumerate() {
        lanes[j] += x.load() * y(whole.len() * LANES + j);
    }
    lanes.iter().sum()
}
