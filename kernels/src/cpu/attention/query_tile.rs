//! Attention of one query tile over all keys that its queries attend to.

use device::{DeviceElement, FloatElement};

use super::super::matmul_tile::{
    CpuCachePrefetch, HALF, OperandSegment, TILE_COLUMNS, TILE_ROWS, TileOperands, column_bytes,
};
use super::super::row_kernel::{RowConversion, dispatch};
use super::head_kv_blocks::{HeadKvBlocks, first_of_pair_mask, group_words, per_step};
use super::softmax::{KeyTileSoftmax, OutputNormalization, RunningSoftmax, softmax_key_tile};
use super::{CpuAttentionArgs, KEY_TILE};
use crate::KvLayout;

/// Up to 12 (token, query head) pairs of one row and one KV head, numbered token by token.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueryTile {
    pub(super) row: usize,
    /// Index of the KV head.
    pub(super) head: usize,
    /// Index of the first (token, query head) pair of the tile, counted from the first token of the row.
    pub(super) first: usize,
    pub(super) pairs: usize,
}

/// Number of groups of 16 positions in a key tile.
const GROUPS: usize = KEY_TILE / HALF;

/// Scratch memory of one thread, for the query tile that it processes.
pub(super) struct TileScratch<T: FloatElement> {
    /// Queries of the tile, `[12][head_dim]`.
    q: Vec<T::MatmulOperand>,
    /// Attention scores of one key tile, `[12][64]`.
    scores: Vec<[f32; KEY_TILE]>,
    probabilities: Vec<[T::MatmulOperand; KEY_TILE]>,
    /// Unnormalised outputs `[12][head_dim]`; rows are padded to a multiple of the tile width (32 columns).
    out: Vec<f32>,
    running: [RunningSoftmax; TILE_ROWS],
    /// Copies of the groups of 16 keys or values of a key tile that the tile product cannot read in place in
    /// the KV pool.
    copies: [Vec<u32>; GROUPS],
    /// Copy of the values of the last pair of positions in bf16, with zeros for the second position of the
    /// pair; used if the number of positions is odd.
    last: Vec<u32>,
}

impl<T: FloatElement> TileScratch<T> {
    pub(super) fn new(layout: &KvLayout) -> Self {
        let zero = T::MatmulOperand::store(0.0);
        let dim = layout.head_dim;
        let words = group_words(layout);
        Self {
            q: vec![zero; TILE_ROWS * dim],
            scores: vec![[0.0; KEY_TILE]; TILE_ROWS],
            probabilities: vec![[zero; KEY_TILE]; TILE_ROWS],
            out: vec![0.0; TILE_ROWS * out_stride(dim)],
            running: [RunningSoftmax::EMPTY; TILE_ROWS],
            copies: std::array::from_fn(|_| vec![0; words]),
            last: vec![0; dim],
        }
    }
}

/// Row stride of `TileScratch::out` in elements: the head size, rounded up to a multiple of the tile width
/// (32 columns).
fn out_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(TILE_COLUMNS)
}

impl QueryTile {
    pub(super) fn run<T: FloatElement>(
        &self,
        call: &CpuAttentionArgs<'_, T>,
        s: &mut TileScratch<T>,
    ) {
        let blocks = HeadKvBlocks {
            pool: call.pool,
            layout: &call.layout,
            fp8: call.fp8,
            table: call.args.rows.table(self.row),
            layer: call.args.layer,
            head: self.head,
            first: self.first_key(call, 0),
        };
        self.begin(call, s);
        let visible_keys = self.visible(call, self.pairs - 1);
        for start in (blocks.first / KEY_TILE * KEY_TILE..visible_keys).step_by(KEY_TILE) {
            let keys = KEY_TILE.min(visible_keys - start);
            self.score(call, s, &blocks, start, keys);
            self.compute_probabilities(call, s, start);
            self.accumulate_values(call, s, &blocks, start, keys);
        }
        self.finish(call, s);
    }

    /// Returns the token (its index in the step) and the query head of (token, query head) pair `i` of the
    /// tile.
    fn pair<T>(&self, call: &CpuAttentionArgs<'_, T>, i: usize) -> (usize, usize) {
        let pair = self.first + i;
        let (from, _) = call.args.rows.tokens(self.row);
        (from + pair / call.group, self.head * call.group + pair % call.group)
    }

    /// Returns the number of keys that pair `i` of the tile attends to: the keys at or before the position of
    /// its token.
    fn visible<T>(&self, call: &CpuAttentionArgs<'_, T>, i: usize) -> usize {
        let (_, to) = call.args.rows.tokens(self.row);
        let (token, _) = self.pair(call, i);
        call.args.rows.context(self.row) - (to - 1 - token)
    }

    /// Returns the first key that pair `i` of the tile attends to. It does not decrease with `i`.
    fn first_key<T>(&self, call: &CpuAttentionArgs<'_, T>, i: usize) -> usize {
        call.args.keys.first_key(self.visible(call, i) - 1)
    }

    fn begin<T: FloatElement>(&self, call: &CpuAttentionArgs<'_, T>, s: &mut TileScratch<T>) {
        let dim = call.layout.head_dim;
        for (i, q) in s.q.chunks_exact_mut(dim).enumerate().take(self.pairs) {
            let (token, head) = self.pair(call, i);
            let from: &[T] = &call.args.q.row(token)[head * dim..][..dim];
            dispatch(call.isa, RowConversion { to: q, from });
        }
        s.out[..self.pairs * out_stride(dim)].fill(0.0);
        s.running = [RunningSoftmax::EMPTY; TILE_ROWS];
    }

    /// Computes `scores = q kᵀ` for the keys at positions `[start, start + keys)`. Scores of groups before the
    /// first key of the tile are not computed.
    fn score<T: FloatElement>(
        &self,
        call: &CpuAttentionArgs<'_, T>,
        s: &mut TileScratch<T>,
        blocks: &HeadKvBlocks<'_>,
        start: usize,
        keys: usize,
    ) {
        let dim = call.layout.head_dim;
        let hidden = blocks.hidden_groups(start) * HALF / TILE_COLUMNS * TILE_COLUMNS;
        for from in (hidden..keys).step_by(TILE_COLUMNS) {
            let groups = key_groups(&mut s.copies, blocks, start + from, keys - from);
            let operands = TileOperands {
                a: s.q.as_ptr().cast(),
                a_stride: dim * T::MatmulOperand::DTYPE.bytes(),
                b: &[OperandSegment { start: groups, steps: dim / per_step(&call.layout) }],
                b_stride: blocks.key_stride(),
                c: s.scores.as_mut_ptr().cast::<f32>().wrapping_add(from),
                c_stride: KEY_TILE,
                accumulate: false,
                prefetch: CpuCachePrefetch::Nothing,
            };
            // SAFETY: a group has 16 columns in every step, in one block of the pool or in a copy of that
            // size; queries and scores have the rows of a full tile.
            unsafe { call.tile_kernels.run(self.pairs, &operands) };
        }
    }

    /// Converts the scores of a key tile to probabilities, and updates the running softmax.
    fn compute_probabilities<T: FloatElement>(
        &self,
        call: &CpuAttentionArgs<'_, T>,
        s: &mut TileScratch<T>,
        start: usize,
    ) {
        let (mut visible, mut hidden) = ([0; TILE_ROWS], [0; TILE_ROWS]);
        for i in 0..self.pairs {
            visible[i] = self.visible(call, i).saturating_sub(start).min(KEY_TILE);
            hidden[i] = self.first_key(call, i).saturating_sub(start).min(KEY_TILE);
        }
        softmax_key_tile(
            call.isa,
            KeyTileSoftmax::<T> {
                scores: &s.scores[..self.pairs],
                probabilities: &mut s.probabilities,
                running: &mut s.running,
                out: &mut s.out,
                out_stride: out_stride(call.layout.head_dim),
                visible: &visible,
                hidden: &hidden,
                scale: call.args.scale,
            },
        );
    }

    /// Computes `out += probabilities · values` for the keys at positions `[start, start + keys)`, without the
    /// groups before the first key of the tile.
    fn accumulate_values<T: FloatElement>(
        &self,
        call: &CpuAttentionArgs<'_, T>,
        s: &mut TileScratch<T>,
        blocks: &HeadKvBlocks<'_>,
        start: usize,
        keys: usize,
    ) {
        let dim = call.layout.head_dim;
        let values = value_segments(s, blocks, start, keys);
        let bytes = column_bytes(call.layout.dtype);
        let hidden = blocks.hidden_groups(start) * HALF;
        for channel in (0..dim).step_by(TILE_COLUMNS) {
            // If the head size is an odd multiple of 16 (16, 48, ..), the last 16 channels are computed
            // twice; the second result is written to the padding of `out`.
            let high = if channel + HALF < dim { channel + HALF } else { channel };
            let b = values.segments.map(|ValueSegment { start, steps }| OperandSegment {
                start: [channel, high].map(|channel| start.wrapping_add(channel * bytes)),
                steps,
            });
            let operands = TileOperands {
                a: s.probabilities.as_ptr().cast::<T::MatmulOperand>().wrapping_add(hidden).cast(),
                a_stride: KEY_TILE * T::MatmulOperand::DTYPE.bytes(),
                b: &b[..values.count],
                b_stride: blocks.value_stride(),
                c: s.out.as_mut_ptr().wrapping_add(channel),
                c_stride: out_stride(dim),
                accumulate: true,
                prefetch: CpuCachePrefetch::Nothing,
            };
            // SAFETY: every step of a segment has `dim` columns; probabilities and outputs have the rows of a
            // full tile.
            unsafe { call.tile_kernels.run(self.pairs, &operands) };
        }
    }

    fn finish<T: FloatElement>(&self, call: &CpuAttentionArgs<'_, T>, s: &mut TileScratch<T>) {
        let dim = call.layout.head_dim;
        let outs = s.out.chunks_exact(out_stride(dim)).zip(&s.running);
        for (i, (out, running)) in outs.enumerate().take(self.pairs) {
            let (token, head) = self.pair(call, i);
            // SAFETY: each (token, query head) pair belongs to one tile.
            let y = unsafe { call.out.part(token, head * dim, dim) };
            let sink = call.args.sinks.map(|sinks| sinks.row::<f32>(0)[head]);
            let RunningSoftmax { max, sum } = *running;
            dispatch(call.isa, OutputNormalization { y, out, sum, max, sink });
        }
    }
}

/// Returns the addresses of two groups of 16 keys from `position` on, of which the first `count` keys exist.
/// Keys that cannot be read in place in the KV pool are first copied to `copies`. A group without keys to
/// attend to is replaced by the other group; its scores are masked.
#[inline]
fn key_groups(
    copies: &mut [Vec<u32>; GROUPS],
    blocks: &HeadKvBlocks<'_>,
    position: usize,
    count: usize,
) -> [*const u8; 2] {
    let [low_copy, high_copy, ..] = copies;
    let mut high_keys = || blocks.keys(position + HALF, (count - HALF).min(HALF), high_copy);
    if blocks.hidden_groups(position) > 0 {
        return [high_keys(); 2];
    }
    let low = blocks.keys(position, count.min(HALF), low_copy);
    [low, if count > HALF { high_keys() } else { low }]
}

/// Values of successive positions that are equally far apart in memory.
#[derive(Clone, Copy)]
struct ValueSegment {
    /// Address of channel 0 of the first step.
    start: *const u8,
    /// Number of steps of the tile product: positions, or pairs of positions in bf16.
    steps: usize,
}

/// Values of the positions of a key tile, in ascending order of position.
struct KeyTileValues {
    /// One segment per group of 16 positions, and at most one for the last, odd position in bf16.
    segments: [ValueSegment; GROUPS + 1],
    /// Number of segments in use.
    count: usize,
}

/// Returns the values of the first `keys` positions of the key tile that begins at position `start`. Groups of
/// 16 positions to which no query of the tile attends are left out.
///
/// In bf16, the KV pool stores the values of two positions as pairs. If `keys` is odd, this request has not
/// written the second half of the last pair. An earlier request may have left infinities there, and infinity
/// times a probability of zero is NaN. The last pair is therefore copied to scratch memory, with zeros in its
/// second half.
fn value_segments<T: FloatElement>(
    s: &mut TileScratch<T>,
    blocks: &HeadKvBlocks<'_>,
    start: usize,
    keys: usize,
) -> KeyTileValues {
    let per_step = per_step(blocks.layout);
    let unused = ValueSegment { start: std::ptr::null(), steps: 0 };
    let mut segments = [unused; GROUPS + 1];
    let hidden = blocks.hidden_groups(start);
    let groups = keys.div_ceil(HALF) - hidden;
    for ((g, segment), copy) in (hidden..).zip(&mut segments).zip(&mut s.copies).take(groups) {
        let count = HALF.min(keys - g * HALF);
        let values = blocks.values(start + g * HALF, count, copy);
        *segment = ValueSegment { start: values, steps: count / per_step };
    }
    if keys.is_multiple_of(per_step) {
        return KeyTileValues { segments, count: groups };
    }
    let ValueSegment { start, steps } = segments[groups - 1];
    let at = start.wrapping_add(steps * blocks.value_stride()).cast::<u32>();
    for (d, last) in s.last.iter_mut().enumerate() {
        // SAFETY: the step is inside the group, and its first position exists.
        *last = unsafe { at.add(d).read() } & first_of_pair_mask();
    }
    segments[groups] = ValueSegment { start: s.last.as_ptr().cast(), steps: 1 };
    KeyTileValues { segments, count: groups + 1 }
}
