//! Keys and values of 16 consecutive positions, as operands of the tile product.
//!
//! Where 16 divides the block size, such a group lies inside one block and is used in place. Other
//! block sizes are for tests and odd configurations: the group is copied together first.
//! Both element types are handled as 4-byte words: one f32, or a pair of bf16.

use super::super::product::HALF;
use crate::{DType, KvLayout};

/// The blocks of one row and one KV head.
pub(super) struct Blocks<'a> {
    pub(super) pool: *const u8,
    pub(super) layout: &'a KvLayout,
    pub(super) table: &'a [i32],
    pub(super) layer: usize,
    pub(super) head: usize,
}

const WORD: usize = 4;

/// Values of `k` per step: 2 for bf16 pairs.
pub(super) fn per_step(layout: &KvLayout) -> usize {
    if layout.dtype == DType::BF16 { 2 } else { 1 }
}

/// Words that `Blocks` may copy keys or values of one group to.
pub(super) fn group_words(layout: &KvLayout) -> usize {
    HALF * layout.head_dim
}

impl Blocks<'_> {
    fn in_place(&self) -> bool {
        self.layout.block_tokens.is_multiple_of(HALF)
    }

    /// Block and offset of a position.
    fn place(&self, position: usize) -> (usize, usize) {
        let block = self.table[position / self.layout.block_tokens];
        (block as usize, position % self.layout.block_tokens)
    }

    fn at(&self, element: usize) -> *const u8 {
        self.pool.wrapping_add(element * self.layout.dtype.bytes())
    }

    fn keys_of(&self, position: usize) -> *const u8 {
        let (block, t) = self.place(position);
        self.at(self.layout.key_tile(self.layer, block, self.head)).wrapping_add(t * WORD)
    }

    fn values_of(&self, position: usize) -> *const u8 {
        let (block, t) = self.place(position);
        let row = t / per_step(self.layout) * self.layout.head_dim * WORD;
        self.at(self.layout.value_tile(self.layer, block, self.head)).wrapping_add(row)
    }

    /// Bytes between steps of keys: a step is one channel, or a pair.
    pub(super) fn key_stride(&self) -> usize {
        WORD * if self.in_place() { self.layout.block_tokens } else { HALF }
    }

    /// Bytes between steps of values: a step is one position, or a pair.
    pub(super) fn value_stride(&self) -> usize {
        self.layout.head_dim * WORD
    }

    /// First step of keys `[position, position + 16)`, of which `count` exist.
    pub(super) fn keys(&self, position: usize, count: usize, copy: &mut [u32]) -> *const u8 {
        if self.in_place() {
            return self.keys_of(position);
        }
        let stride = self.layout.block_tokens * WORD;
        let steps = self.layout.head_dim / per_step(self.layout);
        for i in 0..count {
            let from = self.keys_of(position + i);
            for step in 0..steps {
                // SAFETY: the position has a block in the pool, as `check` saw.
                copy[step * HALF + i] = unsafe { from.add(step * stride).cast::<u32>().read() };
            }
        }
        copy.as_ptr().cast()
    }

    /// First step of values `[position, position + 16)`, of which `count` exist.
    pub(super) fn values(&self, position: usize, count: usize, copy: &mut [u32]) -> *const u8 {
        if self.in_place() {
            return self.values_of(position);
        }
        let dim = self.layout.head_dim;
        let per_step = per_step(self.layout);
        for (step, row) in copy.chunks_exact_mut(dim).enumerate().take(count.div_ceil(per_step)) {
            let from = self.values_of(position + step * per_step);
            // SAFETY: as for keys; blocks hold an even number of positions, so a pair is in one block.
            unsafe { row.as_mut_ptr().copy_from_nonoverlapping(from.cast(), dim) };
        }
        copy.as_ptr().cast()
    }
}
