//! One tile of queries against all keys they see.

use super::super::product::{Ahead, HALF, Operands, TILE_COLUMNS, TILE_ROWS};
use super::super::row_kernel::dispatch;
use super::groups::{Blocks, Group, group_words, per_step};
use super::softmax::{Finish, KeyTile, Running, weigh};
use super::{Call, KEY_TILE};
use crate::KvLayout;
use crate::dtype::Float;

/// Up to 12 (token, query head) pairs of one KV head, numbered token by token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    pub(super) row: usize,
    /// KV head.
    pub(super) head: usize,
    /// First pair, counted from the row's first token.
    pub(super) first: usize,
    pub(super) pairs: usize,
}

/// Working memory of a thread.
pub(super) struct Scratch<T> {
    /// Queries `[12][D]`.
    q: Vec<T>,
    /// `[12][64]`.
    scores: Vec<[f32; KEY_TILE]>,
    probabilities: Vec<[T; KEY_TILE]>,
    /// Outputs `[12][D]`, rows padded to whole tile columns.
    out: Vec<f32>,
    running: [Running; TILE_ROWS],
    /// Two groups of keys, or one of values, copied together.
    copies: [Vec<u32>; 2],
    /// One step of values whose second position does not exist.
    last: Vec<u32>,
}

impl<T: Float> Scratch<T> {
    pub(super) fn new(layout: &KvLayout) -> Self {
        let zero = T::store(0.0);
        let dim = layout.head_dim;
        let words = group_words(layout);
        Self {
            q: vec![zero; TILE_ROWS * dim],
            scores: vec![[0.0; KEY_TILE]; TILE_ROWS],
            probabilities: vec![[zero; KEY_TILE]; TILE_ROWS],
            out: vec![0.0; TILE_ROWS * out_stride(dim)],
            running: [Running::EMPTY; TILE_ROWS],
            copies: [vec![0; words], vec![0; words]],
            last: vec![0; dim],
        }
    }
}

/// Elements between rows of the outputs.
fn out_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(TILE_COLUMNS)
}

impl Tile {
    pub(super) fn run<T: Float>(&self, call: &Call<'_, T>, s: &mut Scratch<T>) {
        let blocks = Blocks {
            pool: call.pool,
            layout: call.layout,
            table: call.args.rows.block_tables.row(self.row),
            layer: call.args.layer,
            head: self.head,
        };
        self.begin(call, s);
        let seen = self.visible(call, self.pairs - 1);
        for start in (0..seen).step_by(KEY_TILE) {
            let keys = KEY_TILE.min(seen - start);
            self.score(call, s, &blocks, start, keys);
            self.weigh(call, s, start);
            self.gather(call, s, &blocks, start, keys);
        }
        self.finish(call, s);
    }

    /// Token of the batch and query head of a pair.
    fn pair<T>(&self, call: &Call<'_, T>, i: usize) -> (usize, usize) {
        let pair = self.first + i;
        let (from, _) = call.args.rows.tokens(self.row);
        (from + pair / call.group, self.head * call.group + pair % call.group)
    }

    /// Keys at or before the token of a pair.
    fn visible<T>(&self, call: &Call<'_, T>, i: usize) -> usize {
        let (_, to) = call.args.rows.tokens(self.row);
        let (token, _) = self.pair(call, i);
        call.args.rows.context(self.row) - (to - 1 - token)
    }

    fn begin<T: Float>(&self, call: &Call<'_, T>, s: &mut Scratch<T>) {
        let dim = call.layout.head_dim;
        for (i, q) in s.q.chunks_exact_mut(dim).enumerate().take(self.pairs) {
            let (token, head) = self.pair(call, i);
            q.copy_from_slice(&call.args.q.row(token)[head * dim..][..dim]);
        }
        s.out[..self.pairs * out_stride(dim)].fill(0.0);
        s.running = [Running::EMPTY; TILE_ROWS];
    }

    /// `scores = q kᵀ` for keys `[start, start + keys)`.
    fn score<T: Float>(
        &self,
        call: &Call<'_, T>,
        s: &mut Scratch<T>,
        blocks: &Blocks<'_>,
        start: usize,
        keys: usize,
    ) {
        let dim = call.layout.head_dim;
        for from in (0..keys).step_by(TILE_COLUMNS) {
            let [low_copy, high_copy] = &mut s.copies;
            let count = keys - from;
            let low = blocks.keys(start + from, count.min(HALF), low_copy);
            let high = if count > HALF {
                blocks.keys(start + from + HALF, (count - HALF).min(HALF), high_copy)
            } else {
                low // No such keys: computed again and not looked at.
            };
            let operands = Operands {
                a: s.q.as_ptr().cast(),
                a_stride: dim * T::DTYPE.bytes(),
                b: [low.start, high.start],
                b_stride: low.stride,
                steps: dim / per_step(call.layout),
                c: s.scores.as_mut_ptr().cast::<f32>().wrapping_add(from),
                c_stride: KEY_TILE,
                resume: false,
                ahead: Ahead::Nothing,
            };
            // SAFETY: a group reaches 16 words in every step: it lies in one block of the pool, or in
            // a copy of that size; queries and scores have the rows of a full tile.
            unsafe { call.products.run(self.pairs, &operands) };
        }
    }

    /// Scores to probabilities.
    fn weigh<T: Float>(&self, call: &Call<'_, T>, s: &mut Scratch<T>, start: usize) {
        let mut visible = [0; TILE_ROWS];
        for (i, visible) in visible.iter_mut().enumerate().take(self.pairs) {
            *visible = self.visible(call, i).saturating_sub(start).min(KEY_TILE);
        }
        weigh(
            call.isa,
            KeyTile {
                scores: &s.scores[..self.pairs],
                probabilities: &mut s.probabilities,
                running: &mut s.running,
                out: &mut s.out,
                out_stride: out_stride(call.layout.head_dim),
                visible: &visible,
                scale: call.args.scale,
            },
        );
    }

    /// `out += probabilities · values` for keys `[start, start + keys)`.
    fn gather<T: Float>(
        &self,
        call: &Call<'_, T>,
        s: &mut Scratch<T>,
        blocks: &Blocks<'_>,
        start: usize,
        keys: usize,
    ) {
        let per_step = per_step(call.layout);
        for from in (0..keys).step_by(HALF) {
            let count = HALF.min(keys - from);
            let values = blocks.values(start + from, count, &mut s.copies[0]);
            let whole = count / per_step;
            self.add_values(call, s, &values, from, whole);
            if whole * per_step < count {
                // The second position of the last pair was never written by this request: whatever a
                // former owner left there must not meet a zero, for it may be infinite.
                let at = values.start.wrapping_add(whole * values.stride).cast::<u32>();
                for (d, last) in s.last.iter_mut().enumerate() {
                    // SAFETY: the step is inside the group, and its first position exists.
                    *last = unsafe { at.add(d).read() } & first_of_pair();
                }
                let group = Group { start: s.last.as_ptr().cast(), stride: 0 };
                self.add_values(call, s, &group, from + whole * per_step, 1);
            }
        }
    }

    /// Adds `steps` steps of values to the outputs, weighed by the probabilities from `from` on.
    fn add_values<T: Float>(
        &self,
        call: &Call<'_, T>,
        s: &mut Scratch<T>,
        values: &Group,
        from: usize,
        steps: usize,
    ) {
        let dim = call.layout.head_dim;
        let probabilities = s.probabilities.as_ptr().cast::<T>().wrapping_add(from);
        for channel in (0..dim).step_by(TILE_COLUMNS) {
            let low = values.start.wrapping_add(channel * 4);
            // Behind a head of 16, 48, .. channels the half is computed again into the padding.
            let high = if channel + HALF < dim { low.wrapping_add(HALF * 4) } else { low };
            let operands = Operands {
                a: probabilities.cast(),
                a_stride: KEY_TILE * T::DTYPE.bytes(),
                b: [low, high],
                b_stride: values.stride,
                steps,
                c: s.out.as_mut_ptr().wrapping_add(channel),
                c_stride: out_stride(dim),
                resume: true,
                ahead: Ahead::Nothing,
            };
            // SAFETY: every step of the group holds `dim` words; probabilities and outputs have the
            // rows of a full tile.
            unsafe { call.products.run(self.pairs, &operands) };
        }
    }

    fn finish<T: Float>(&self, call: &Call<'_, T>, s: &mut Scratch<T>) {
        let dim = call.layout.head_dim;
        let outs = s.out.chunks_exact(out_stride(dim)).zip(&s.running);
        for (i, (out, running)) in outs.enumerate().take(self.pairs) {
            let (token, head) = self.pair(call, i);
            // SAFETY: each (token, head) belongs to one tile.
            let y = unsafe { call.out.part(token, head * dim, dim) };
            dispatch(call.isa, Finish { y, out, sum: running.sum });
        }
    }
}

/// Mask of the first bf16 of a pair: little endian, as x86 and every other supported target.
const fn first_of_pair() -> u32 {
    u32::from_ne_bytes([0xff, 0xff, 0, 0])
}
