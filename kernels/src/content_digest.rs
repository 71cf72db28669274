//! Digests of weights: XXH3 with 64 bits over blocks of a matrix, added up.
//!
//! A sum does not depend on the order in which its terms are made, so threads can share the blocks of a large matrix, and
//! callers add the digests of tensors in any order. Each block is hashed under a seed made of the tensor's key and the block's position, so equal bytes in another place have another digest. The
//! digest finds mistakes (a file that was replaced, a copy that was cut short), not forgeries.

use std::ops::Range;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Bytes of a block, rounded to whole rows: large enough that a seed costs nothing, small enough for a share per thread.
const BLOCK_BYTES: usize = 1 << 20;
/// Odd, with bits spread evenly: consecutive blocks get unrelated seeds.
const BLOCK_SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// The rectangle of a row-major matrix that a rank loads, as bytes.
#[derive(Debug, Clone)]
pub struct MatrixWindow<'a> {
    /// The whole matrix.
    pub bytes: &'a [u8],
    /// Bytes of each of its rows.
    pub row_bytes: usize,
    /// Rows of the window.
    pub rows: Range<usize>,
    /// Bytes of each row that belong to the window.
    pub columns: Range<usize>,
}

/// Digest of `bytes` under `seed`.
#[must_use]
pub fn digest_bytes(bytes: &[u8], seed: u64) -> u64 {
    xxh3_64_with_seed(bytes, seed)
}

impl MatrixWindow<'_> {
    /// Number of blocks that the window is hashed in; 0 for a window without rows.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.rows.len().div_ceil(self.block_rows())
    }

    /// Digest of the window's bytes under `key`, which stands for all that names the tensor.
    ///
    /// # Panics
    /// The window does not lie in the matrix.
    #[must_use]
    pub fn digest(&self, key: u64) -> u64 {
        self.digest_blocks(0..self.blocks(), key)
    }

    /// The share of some blocks in the digest: the shares of all blocks add up to it, wrapping.
    ///
    /// # Panics
    /// The window does not lie in the matrix, or has no such blocks.
    #[must_use]
    pub fn digest_blocks(&self, blocks: Range<usize>, key: u64) -> u64 {
        let block_rows = self.block_rows();
        blocks.map(|block| self.block(block, block_rows, key)).fold(0, u64::wrapping_add)
    }

    fn block_rows(&self) -> usize {
        (BLOCK_BYTES / self.columns.len().max(1)).max(1)
    }

    fn block(&self, block: usize, block_rows: usize, key: u64) -> u64 {
        let seed = key ^ (block as u64 + 1).wrapping_mul(BLOCK_SEED);
        let first = self.rows.start + block * block_rows;
        let last = (first + block_rows).min(self.rows.end);
        if self.columns.len() == self.row_bytes {
            return xxh3_64_with_seed(
                &self.bytes[first * self.row_bytes..last * self.row_bytes],
                seed,
            );
        }
        let mut hasher = Xxh3::with_seed(seed);
        for row in first..last {
            let start = row * self.row_bytes;
            hasher.update(&self.bytes[start + self.columns.start..start + self.columns.end]);
        }
        hasher.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW_BYTES: usize = 300;

    fn matrix(rows: usize) -> Vec<u8> {
        (0..rows * ROW_BYTES).map(|i| (i % 251) as u8 ^ (i / 65_536) as u8).collect()
    }

    fn window(bytes: &[u8], columns: Range<usize>) -> MatrixWindow<'_> {
        MatrixWindow { bytes, row_bytes: ROW_BYTES, rows: 1..bytes.len() / ROW_BYTES, columns }
    }

    #[test]
    fn shares_of_blocks_add_up_to_the_digest() {
        let bytes = matrix(3 * BLOCK_BYTES / ROW_BYTES + 7);
        for columns in [0..ROW_BYTES, 50..ROW_BYTES] {
            let window = window(&bytes, columns);
            let blocks = window.blocks();
            assert!(blocks > 2);
            let shares = [0..1, 1..2, 2..blocks].map(|share| window.digest_blocks(share, 1));
            assert_eq!(shares.into_iter().fold(0, u64::wrapping_add), window.digest(1));
        }
    }

    #[test]
    fn each_byte_of_the_window_changes_the_digest() {
        let mut bytes = matrix(9);
        for columns in [0..ROW_BYTES, 7..13] {
            let before = window(&bytes, columns.clone()).digest(1);
            for at in 0..bytes.len() {
                bytes[at] ^= 1;
                let inside = at >= ROW_BYTES && columns.contains(&(at % ROW_BYTES));
                assert_eq!(window(&bytes, columns.clone()).digest(1) != before, inside, "{at}");
                bytes[at] ^= 1;
            }
        }
    }

    #[test]
    fn key_and_position_change_the_digest() {
        let bytes = matrix(9);
        assert_ne!(window(&bytes, 0..4).digest(1), window(&bytes, 0..4).digest(2));
        // Equal blocks in other places.
        let zeros = vec![0; 2 * BLOCK_BYTES];
        let block = |block| {
            let rows = 0..2;
            let whole = MatrixWindow {
                bytes: &zeros,
                row_bytes: BLOCK_BYTES,
                rows,
                columns: 0..BLOCK_BYTES,
            };
            whole.block(block, 1, 5)
        };
        assert_ne!(block(0), block(1));
    }

    #[test]
    fn window_without_rows_or_columns_has_a_digest() {
        let bytes = matrix(3);
        let empty = MatrixWindow { rows: 2..2, ..window(&bytes, 0..0) };
        assert_eq!(empty.digest(1), 0);
        assert_eq!(window(&bytes, 5..5).digest(1), window(&bytes, 9..9).digest(1));
    }
}
