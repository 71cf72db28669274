//! Content digests of weights: the digest of a matrix is the wrapping sum of the XXH3 64-bit hashes of its
//! blocks.
//!
//! The sum does not depend on the order of its terms, so threads hash the blocks of a large matrix in
//! parallel, and callers add the digests of tensors in any order. The hash seed of a block combines the key
//! of its tensor with the index of the block, so equal bytes at another position have another digest. The
//! digest detects mistakes (a replaced file, a truncated copy), not forgeries.

use std::ops::Range;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Size of a hashed block in bytes, rounded to whole rows: large enough that the cost of hash initialisation
/// is negligible, small enough that every thread gets blocks.
const BLOCK_BYTES: usize = 1 << 20;
/// Odd multiplier that derives the hash seed of a block from its index: its bits are evenly spread, so that
/// consecutive blocks get unrelated seeds.
const BLOCK_SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// The part (window) of a row-major matrix that a rank loads, and whose content is hashed: a range of rows,
/// and a range of bytes within each row.
#[derive(Debug, Clone)]
pub struct HashedMatrixPart<'a> {
    /// Bytes of the whole matrix.
    pub bytes: &'a [u8],
    /// Bytes per row of the whole matrix.
    pub row_bytes: usize,
    /// Rows of the window.
    pub rows: Range<usize>,
    /// Byte range of the window within each row.
    pub columns: Range<usize>,
}

/// Returns the XXH3 64-bit hash of `bytes` with `seed`.
#[must_use]
pub fn digest_bytes(bytes: &[u8], seed: u64) -> u64 {
    xxh3_64_with_seed(bytes, seed)
}

impl HashedMatrixPart<'_> {
    /// Number of blocks into which the window is split for hashing; 0 for a window without rows.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.rows.len().div_ceil(self.block_rows())
    }

    /// Returns the digest of the bytes inside the window. `key` identifies the tensor.
    ///
    /// # Panics
    /// If the window is not inside the matrix.
    #[must_use]
    pub fn digest(&self, key: u64) -> u64 {
        self.digest_blocks(0..self.blocks(), key)
    }

    /// Returns the wrapping sum of the hashes of `blocks`. The wrapping sum over all blocks is the digest.
    ///
    /// # Panics
    /// If the window is not inside the matrix, or `blocks` exceeds its number of blocks.
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

    fn window(bytes: &[u8], columns: Range<usize>) -> HashedMatrixPart<'_> {
        HashedMatrixPart { bytes, row_bytes: ROW_BYTES, rows: 1..bytes.len() / ROW_BYTES, columns }
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
        // Blocks with equal bytes at different indices have different digests.
        let zeros = vec![0; 2 * BLOCK_BYTES];
        let block = |block| {
            let rows = 0..2;
            let whole = HashedMatrixPart {
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
        let empty = HashedMatrixPart { rows: 2..2, ..window(&bytes, 0..0) };
        assert_eq!(empty.digest(1), 0);
        assert_eq!(window(&bytes, 5..5).digest(1), window(&bytes, 9..9).digest(1));
    }
}
