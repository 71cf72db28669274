//! Batches for the attention benchmarks, over a KV pool in which every slot has been written.

use super::random_weights::ROTATED_BYTES;
use crate::ExecutorError;
use ops::{DeviceBatchMetadata, HostBatchMetadata, OpError, Ops, RopeTable};

/// Maximum bytes of the KV pool of a benchmark.
const POOL_BYTES_MAX: usize = 512 << 20;
/// Maximum number of token slots in the KV pool of a benchmark.
const POOL_SLOTS_MAX: usize = 1 << 18;
/// Maximum number of batches of one shape. Successive launches use the batches in turn, and each batch reads
/// different KV blocks.
const BATCHES_MAX: usize = 64;
/// Number of tokens that [`KvPoolSize::fill`] writes to the pool in one batch.
const FILL_TOKENS: usize = 512;

/// Shape of a batch whose rows all have the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UniformBatchShape {
    pub(super) rows: usize,
    /// New tokens of each row.
    pub(super) new_tokens: usize,
    /// Number of keys of each row, including its new tokens.
    pub(super) context: usize,
}

/// Size of the KV pool of an attention benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvPoolSize {
    pub(super) blocks: usize,
    pub(super) block_tokens: usize,
    /// Bytes of keys and values per token in the pool.
    pub(super) token_bytes: usize,
}

impl UniformBatchShape {
    /// Number of new tokens in the batch.
    pub(super) fn tokens(self) -> usize {
        self.rows * self.new_tokens
    }

    /// Number of query-key pairs that causal attention computes.
    pub(super) fn pairs(self) -> usize {
        let before = self.context - self.new_tokens;
        self.rows * (self.new_tokens * before + self.new_tokens * (self.new_tokens + 1) / 2)
    }
}

impl KvPoolSize {
    /// Returns the size of a pool for batches of shapes up to `largest`. The pool is larger than the caches
    /// of the device if `POOL_BYTES_MAX` and `POOL_SLOTS_MAX` allow it.
    pub(super) fn new(largest: UniformBatchShape, block_tokens: usize, token_bytes: usize) -> Self {
        let rotated = BATCHES_MAX * largest.rows * largest.context.next_multiple_of(block_tokens);
        let slots = rotated.min(POOL_BYTES_MAX / token_bytes.max(1)).min(POOL_SLOTS_MAX);
        let blocks = (slots / block_tokens).max(largest.context.div_ceil(block_tokens)).max(1);
        Self { blocks, block_tokens, token_bytes }
    }

    fn slots(self) -> usize {
        self.blocks * self.block_tokens
    }

    /// Returns batches of one shape that read different KV blocks; successive launches use the batches in
    /// turn. A batch that needs more blocks than the pool has uses the same block for several rows.
    pub(super) fn batches(
        self,
        ops: &Ops,
        shape: UniformBatchShape,
    ) -> Result<Vec<DeviceBatchMetadata>, ExecutorError> {
        let bytes = shape.rows * shape.context * self.token_bytes;
        let rotated_batches = (ROTATED_BYTES / bytes.max(1)).clamp(1, BATCHES_MAX);
        let blocks = shape.rows * shape.context.div_ceil(self.block_tokens);
        let count = rotated_batches.min((self.blocks / blocks).max(1));
        let batch = |i: usize| Ok(DeviceBatchMetadata::new(ops, &self.inputs(shape, i * blocks))?);
        (0..count).map(batch).collect()
    }

    /// Returns the inputs of a batch of this shape whose first KV block has index `first`.
    fn inputs(self, shape: UniformBatchShape, first: usize) -> HostBatchMetadata {
        let UniformBatchShape { rows, new_tokens, context } = shape;
        let width = context.div_ceil(self.block_tokens);
        let block = |row: usize, i: usize| (first + row * width + i) % self.blocks;
        let positions = context - new_tokens..context;
        let slot = |row: usize, position: usize| {
            let start = block(row, position / self.block_tokens) * self.block_tokens;
            (start + position % self.block_tokens) as i64
        };
        let of_row = |row| positions.clone().map(move |position| (row, position));
        let positions_of_rows: Vec<_> = (0..rows).flat_map(of_row).collect();
        HostBatchMetadata {
            positions: positions_of_rows.iter().map(|&(_, position)| position as i32).collect(),
            slots: positions_of_rows.iter().map(|&(row, position)| slot(row, position)).collect(),
            cu_q: (0..=rows).map(|row| (row * new_tokens) as i32).collect(),
            context_lens: vec![context as i32; rows],
            block_tables: (0..rows)
                .flat_map(|row| (0..width).map(move |i| block(row, i) as i32))
                .collect(),
            further_groups: Vec::new(),
            state_slots: Vec::new(),
        }
    }

    /// Calls `write` with batches that cover every slot of the pool. Memory that was never written would be
    /// mapped to a single page of zeros; this page would stay in the cache, so reading the pool would be too
    /// fast.
    pub(super) fn fill(
        self,
        ops: &Ops,
        write: &mut dyn FnMut(&DeviceBatchMetadata) -> Result<(), OpError>,
    ) -> Result<(), ExecutorError> {
        let blocks_at_once = (FILL_TOKENS / self.block_tokens).max(1);
        for first in (0..self.blocks).step_by(blocks_at_once) {
            let blocks = blocks_at_once.min(self.blocks - first);
            let new_tokens = blocks * self.block_tokens;
            let shape = UniformBatchShape { rows: 1, new_tokens, context: new_tokens };
            write(&DeviceBatchMetadata::new(ops, &self.inputs(shape, first))?)?;
        }
        debug_assert!(self.slots() > 0);
        Ok(())
    }

    /// Number of tokens in the largest batch that [`KvPoolSize::fill`] passes to `write`.
    pub(super) fn fill_tokens(self) -> usize {
        (FILL_TOKENS / self.block_tokens).max(1).min(self.blocks) * self.block_tokens
    }
}

/// Returns a RoPE table of `half` channel pairs for the positions below `positions`.
pub(super) fn rope_table(
    ops: &Ops,
    positions: usize,
    half: usize,
) -> Result<RopeTable, ExecutorError> {
    let angles = || (0..positions * half).map(|i| i as f32 * 0.37);
    let cos: Vec<f32> = angles().map(f32::cos).collect();
    let sin: Vec<f32> = angles().map(f32::sin).collect();
    Ok(ops.rope_table(&cos, &sin, half)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_rows_have_separate_blocks() {
        let pool = KvPoolSize { blocks: 8, block_tokens: 4, token_bytes: 2 };
        let shape = UniformBatchShape { rows: 2, new_tokens: 1, context: 6 };
        let inputs = pool.inputs(shape, 4);
        assert_eq!(inputs.block_tables, [4, 5, 6, 7]);
        assert_eq!((inputs.positions, inputs.slots), (vec![5, 5], vec![21, 29]));
        assert_eq!((inputs.cu_q, inputs.context_lens), (vec![0, 1, 2], vec![6, 6]));
        assert_eq!((shape.tokens(), shape.pairs()), (2, 12));
    }

    #[test]
    fn prefill_pairs_are_causal() {
        let shape = UniformBatchShape { rows: 1, new_tokens: 4, context: 4 };
        assert_eq!((shape.tokens(), shape.pairs()), (4, 10));
        let chunk = UniformBatchShape { rows: 2, new_tokens: 2, context: 5 };
        assert_eq!(chunk.pairs(), 2 * (4 + 5));
    }

    #[test]
    fn pools_are_bounded_and_hold_one_row() {
        let largest = UniformBatchShape { rows: 512, new_tokens: 1, context: 4096 };
        let pool = KvPoolSize::new(largest, 16, 4096);
        assert_eq!(pool.slots() * 4096, POOL_BYTES_MAX);
        let tiny = KvPoolSize::new(largest, 16, 2);
        assert_eq!(tiny.slots(), POOL_SLOTS_MAX);
        let wide = KvPoolSize::new(
            UniformBatchShape { rows: 1, new_tokens: 1, context: 4096 },
            16,
            1 << 20,
        );
        assert_eq!(wide.blocks, 256, "one row fits, however large");
    }
}
