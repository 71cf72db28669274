//! Keys and values of 16 consecutive positions (a group), in the operand layout of the tile matrix product.
//!
//! If the block size is a multiple of 16, a group is inside one KV block and is read in place. Other block
//! sizes are for tests and unusual configurations: the group is first copied to contiguous memory. Groups of
//! an fp8 pool are always copied and dequantised. One step of the tile product reads one column for each
//! position (keys) or channel (values); a column is one f32, one f16, or a pair of bf16.

use device::{DType, Fp8E4m3, bf16, f16};

use super::super::matmul_tile::{HALF, column_bytes};
use crate::KvLayout;

/// Keys and values of one row of the batch for one KV head: the block table of the row, and the location of
/// the blocks in the KV pool.
pub(super) struct HeadKvBlocks<'a> {
    pub(super) pool: *const u8,
    /// Layout of the KV pool, with `dtype` replaced by the activation type, to which fp8 keys and values are
    /// converted.
    pub(super) layout: &'a KvLayout,
    /// Whether the pool stores keys and values in fp8.
    pub(super) fp8: bool,
    pub(super) table: &'a [i32],
    pub(super) layer: usize,
    pub(super) head: usize,
    /// First position that a query of the tile attends to. Blocks of earlier positions are not read.
    pub(super) first: usize,
}

/// Number of channels (keys) or positions (values) that one step of the tile product covers: 2 in bf16, whose
/// dot-product instruction multiplies pairs, otherwise 1.
pub(super) fn per_step(layout: &KvLayout) -> usize {
    if layout.dtype == DType::BF16 { 2 } else { 1 }
}

/// Size in 32-bit words of the buffer for a copy of the keys or values of one group of 16 positions.
pub(super) fn group_words(layout: &KvLayout) -> usize {
    HALF * layout.head_dim
}

/// Mask that selects the first bf16 of a pair in a 32-bit word; all supported targets are little-endian.
pub(super) const fn first_of_pair_mask() -> u32 {
    u32::from_ne_bytes([0xff, 0xff, 0, 0])
}

impl HeadKvBlocks<'_> {
    fn in_place(&self) -> bool {
        !self.fp8 && self.layout.block_tokens.is_multiple_of(HALF)
    }

    /// Returns the number of groups at the start of the key tile at `start` in which no query of the tile
    /// attends to a key.
    pub(super) fn hidden_groups(&self, start: usize) -> usize {
        self.first.saturating_sub(start) / HALF
    }

    /// Returns the id of the KV block that contains position `position` of the row, and the offset of that
    /// position in the block.
    fn locate(&self, position: usize) -> (usize, usize) {
        let block = self.table[position / self.layout.block_tokens];
        (block as usize, position % self.layout.block_tokens)
    }

    /// Bytes of one column of a step of the tile product: one f32, one f16, or a pair of bf16.
    fn column(&self) -> usize {
        column_bytes(self.layout.dtype)
    }

    fn element_ptr(&self, element: usize) -> *const u8 {
        self.pool.wrapping_add(element * self.layout.dtype.bytes())
    }

    fn keys_of(&self, position: usize) -> *const u8 {
        let (block, t) = self.locate(position);
        self.element_ptr(self.layout.key_tile(self.layer, block, self.head))
            .wrapping_add(t * self.column())
    }

    fn values_of(&self, position: usize) -> *const u8 {
        let (block, t) = self.locate(position);
        let row = t / per_step(self.layout) * self.layout.head_dim * self.column();
        self.element_ptr(self.layout.value_tile(self.layer, block, self.head)).wrapping_add(row)
    }

    /// Distance in bytes between two steps of the tile product over keys; a step is one channel, or in bf16 a
    /// pair of channels.
    pub(super) fn key_stride(&self) -> usize {
        self.column() * if self.in_place() { self.layout.block_tokens } else { HALF }
    }

    /// Distance in bytes between two steps of the tile product over values; a step is one position, or in
    /// bf16 a pair of positions.
    pub(super) fn value_stride(&self) -> usize {
        self.layout.head_dim * self.column()
    }

    /// Returns the address of the keys at positions `[position, position + 16)`, of which the first `count`
    /// exist, in the operand layout of the tile product. Keys that cannot be read in place in the KV pool are
    /// first copied to `copy`. Keys before the first position are undefined.
    pub(super) fn keys(&self, position: usize, count: usize, copy: &mut [u32]) -> *const u8 {
        if self.in_place() {
            return self.keys_of(position);
        }
        if self.fp8 {
            for i in self.first.saturating_sub(position)..count {
                let (block, t) = self.locate(position + i);
                let tile = self.layout.key_tile(self.layer, block, self.head);
                for step in 0..self.layout.head_dim / per_step(self.layout) {
                    let d = step * per_step(self.layout);
                    let word = self.fp8_word(tile + t * self.layout.head_dim + d, 1);
                    self.put(copy, step * HALF + i, word);
                }
            }
            return copy.as_ptr().cast();
        }
        let stride = self.layout.block_tokens * self.column();
        let steps = self.layout.head_dim / per_step(self.layout);
        for i in self.first.saturating_sub(position)..count {
            let from = self.keys_of(position + i);
            for step in 0..steps {
                // SAFETY: the position has a block in the pool, as `AttentionMetadata::check` verified.
                let word = unsafe { self.read(from.add(step * stride)) };
                self.put(copy, step * HALF + i, word);
            }
        }
        copy.as_ptr().cast()
    }

    /// Returns the address of the values at positions `[position, position + 16)`, of which the first `count`
    /// exist, in the operand layout of the tile product. Values that cannot be read in place in the KV pool
    /// are first copied to `copy`, and so are those of a group that begins before the first position: values
    /// of earlier positions are zero, because zero probabilities do not cancel infinities and NaN.
    pub(super) fn values(&self, position: usize, count: usize, copy: &mut [u32]) -> *const u8 {
        if self.in_place() && position >= self.first {
            return self.values_of(position);
        }
        let (dim, per_step) = (self.layout.head_dim, per_step(self.layout));
        let hidden = self.first.saturating_sub(position);
        copy[..(hidden / per_step * dim * self.column()).div_ceil(4)].fill(0);
        for step in hidden / per_step..count.div_ceil(per_step) {
            // Blocks have an even number of positions, so a pair is in one block.
            let position = position + step * per_step;
            let mask = if position < self.first { !first_of_pair_mask() } else { u32::MAX };
            for d in 0..dim {
                self.put(copy, step * dim + d, self.value_word(position, d) & mask);
            }
        }
        copy.as_ptr().cast()
    }

    /// Returns the bits of channel `d` of the value at `position`; in bf16, those of the values at `position`
    /// and `position + 1`.
    fn value_word(&self, position: usize, d: usize) -> u32 {
        if self.fp8 {
            let (block, t) = self.locate(position);
            let tile = self.layout.value_tile(self.layer, block, self.head);
            return self.fp8_word(tile + t * self.layout.head_dim + d, self.layout.head_dim);
        }
        // SAFETY: the position has a block in the pool, as `AttentionMetadata::check` verified.
        unsafe { self.read(self.values_of(position).add(d * self.column())) }
    }

    /// Reads one column of a step (one f32, one f16, or a pair of bf16) from the KV pool.
    ///
    /// # Safety
    /// `from` points to a readable column.
    unsafe fn read(&self, from: *const u8) -> u32 {
        // SAFETY: readable by the caller's contract, and aligned: columns are at multiples of their size.
        unsafe {
            match self.column() {
                2 => u32::from(from.cast::<u16>().read()),
                _ => from.cast::<u32>().read(),
            }
        }
    }

    /// Writes `word` to column `column` of `copy`, the copy of a group of 16 positions. Columns are numbered
    /// consecutively over all steps of the group.
    fn put(&self, copy: &mut [u32], column: usize, word: u32) {
        if self.column() == 4 {
            copy[column] = word;
            return;
        }
        assert!(column / 2 < copy.len(), "column {column} of {} words", copy.len());
        // SAFETY: each word has two columns, and the assertion checked the index.
        unsafe { copy.as_mut_ptr().cast::<u16>().add(column).write(word as u16) };
    }

    /// Converts the fp8 element at index `element` of the pool to the bits of an f32 or f16. For bf16,
    /// converts the elements at `element` and `element + next` to a pair.
    fn fp8_word(&self, element: usize, next: usize) -> u32 {
        // SAFETY: the position has a block in the pool, as `AttentionMetadata::check` verified, and a pair is
        // in one block.
        let value_at = |i: usize| Fp8E4m3::from_bits(unsafe { self.pool.add(i).read() }).to_f32();
        match self.layout.dtype {
            DType::F16 => return u32::from(f16::from_f32(value_at(element)).to_bits()),
            DType::F32 => return value_at(element).to_bits(),
            _ => {}
        }
        let [low, high] =
            [element, element + next].map(|i| bf16::from_f32(value_at(i)).to_le_bytes());
        u32::from_ne_bytes([low[0], low[1], high[0], high[1]])
    }
}
