//! Channel order within a head for partial and for interleaved rotary embedding.
//!
//! Kernels rotate the channels `i` and `i + d/2` of a head with `d` channels as a pair. With partial RoPE,
//! the pairs are the channels `i` and `i + r/2` of the first `r` channels, and the other channels are not
//! rotated. With interleaved RoPE, the pairs are adjacent channels. The rows of query and key projections are therefore reordered at load time so that the channels
//! of each pair are `d/2` apart; channels that are not rotated have the angle 0. The order does not change
//! attention scores, because queries and keys have the same order.

use ops::HostMat;
use std::iter::once;
use std::ops::Range;

/// Row order in which query and key projections are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RotaryRowOrder {
    /// Number of channels per head.
    pub(crate) head_dim: usize,
    /// Number of channels per head that RoPE rotates; even and at most `head_dim`.
    pub(crate) rotated: usize,
    /// Channels of a checkpoint that are rotated as a pair.
    pub(crate) pairs: RotaryPairKind,
}

/// Channels of a head that are rotated as a pair, among the first `r` channels, which RoPE rotates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RotaryPairKind {
    /// Channels `i` and `i + r/2`.
    Halves,
    /// Channels `2i` and `2i + 1` (interleaved).
    Adjacent,
}

impl RotaryRowOrder {
    /// Ranges of the stored channels of a head, in the order in which they are loaded.
    fn ranges(self) -> Vec<Range<usize>> {
        let Self { head_dim, rotated, pairs } = self;
        let split = rotated + (head_dim - rotated) / 2;
        match pairs {
            RotaryPairKind::Halves => {
                vec![0..rotated / 2, rotated..split, rotated / 2..rotated, split..head_dim]
            }
            RotaryPairKind::Adjacent => {
                let every_second = |first: usize| (first..rotated).step_by(2).map(|i| i..i + 1);
                let first_half = every_second(0).chain(once(rotated..split));
                first_half.chain(every_second(1)).chain(once(split..head_dim)).collect()
            }
        }
    }

    /// Returns the rows of a projection `[heads · head_dim, inputs]`, in the order in which they are loaded.
    pub(super) fn of_matrix<'a>(self, matrix: &HostMat<'a>) -> Vec<HostMat<'a>> {
        let heads = (0..matrix.rows()).step_by(self.head_dim);
        let of_head = |head: usize| {
            let ranges = self.ranges().into_iter().filter(|range| !range.is_empty());
            ranges.map(move |range| matrix.row_range(head + range.start, range.len()))
        };
        heads.flat_map(of_head).collect()
    }

    /// Returns the elements of a vector `[heads · head_dim]`, in the order in which they are loaded.
    pub(super) fn of_vector(self, vector: &[f32]) -> Vec<f32> {
        let heads = vector.chunks(self.head_dim);
        heads
            .flat_map(|head| self.ranges().into_iter().flat_map(|range| head[range].to_vec()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ops::DType;

    #[test]
    fn rotated_pairs_are_half_a_head_apart() {
        let rows = RotaryRowOrder { head_dim: 16, rotated: 12, pairs: RotaryPairKind::Halves };
        let channels: Vec<f32> = (0..32u8).map(f32::from).collect();
        let loaded = rows.of_vector(&channels);
        for head in [0, 16] {
            for pair in 0..6 {
                let [first, second] = [loaded[head + pair], loaded[head + pair + 8]];
                assert_eq!((first, second), (channels[head + pair], channels[head + pair + 6]));
            }
            let rest = [6, 7, 14, 15].map(|i| loaded[head + i]);
            assert_eq!(rest, [12, 13, 14, 15].map(|i| channels[head + i]));
        }
        let bytes: Vec<u8> = channels.iter().flat_map(|c| c.to_le_bytes()).collect();
        let matrix = HostMat::new(&bytes, DType::F32, 32, 1).unwrap();
        let mut row = [0.0];
        let mut found = Vec::new();
        for part in rows.of_matrix(&matrix) {
            for r in 0..part.rows() {
                part.read_row(r, &mut row);
                found.push(row[0]);
            }
        }
        assert_eq!(found, loaded);
    }

    #[test]
    fn full_rotation_keeps_the_order() {
        let channels: Vec<f32> = (0..32u8).map(f32::from).collect();
        let rows = RotaryRowOrder { head_dim: 16, rotated: 16, pairs: RotaryPairKind::Halves };
        assert_eq!(rows.of_vector(&channels), channels);
    }

    #[test]
    fn interleaved_pairs_are_half_a_head_apart() {
        let channels: Vec<f32> = (0..32u8).map(f32::from).collect();
        for rotated in [16, 8] {
            let rows = RotaryRowOrder { head_dim: 16, rotated, pairs: RotaryPairKind::Adjacent };
            let loaded = rows.of_vector(&channels);
            for head in [0, 16] {
                for pair in 0..rotated / 2 {
                    let [first, second] = [loaded[head + pair], loaded[head + pair + 8]];
                    let stored = head + 2 * pair;
                    assert_eq!((first, second), (channels[stored], channels[stored + 1]));
                }
            }
            let mut sorted = loaded.clone();
            sorted.sort_by(f32::total_cmp);
            assert_eq!(sorted, channels);
        }
    }
}
