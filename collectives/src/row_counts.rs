//! How many rows each rank of a group has for each other one.

use std::ops::Range;

/// Rows that every rank has for every rank, itself included: the same value on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowCounts {
    /// Of rank `r` for rank `q` at `r · size + q`.
    rows: Vec<usize>,
    size: usize,
}

impl RowCounts {
    /// Of `size` ranks: `rows` has what rank 0 has for each of them, then what rank 1 has.
    pub(crate) fn new(rows: Vec<usize>, size: usize) -> Self {
        debug_assert_eq!(rows.len(), size * size);
        Self { rows, size }
    }

    /// Ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// What rank `from` has for each rank.
    #[must_use]
    pub fn rows_from(&self, from: usize) -> &[usize] {
        &self.rows[from * self.size..(from + 1) * self.size]
    }

    /// Rows that rank `from` sends in all.
    #[must_use]
    pub fn sent_by(&self, from: usize) -> usize {
        self.rows_from(from).iter().sum()
    }

    /// Rows that rank `to` gets in all.
    #[must_use]
    pub fn received_by(&self, to: usize) -> usize {
        (0..self.size).map(|from| self.rows_from(from)[to]).sum()
    }

    /// Rows that go from one rank to another one.
    #[must_use]
    pub fn crossing_rows(&self) -> usize {
        (0..self.size).map(|rank| self.sent_by(rank) - self.rows_from(rank)[rank]).sum()
    }

    /// The way back: each rank returns what it got to where it came from.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let size = self.size;
        let back = |i| self.rows_from(i % size)[i / size];
        Self { rows: (0..size * size).map(back).collect(), size }
    }

    /// The rows from one rank to another: where they lie in what is sent, and where they begin in what comes.
    pub(crate) fn send_range_and_offset(&self, from: usize, to: usize) -> (Range<usize>, usize) {
        let start: usize = self.rows_from(from)[..to].iter().sum();
        let before = (0..from).map(|rank| self.rows_from(rank)[to]).sum();
        (start..start + self.rows_from(from)[to], before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reversed_counts_return_the_rows() {
        let counts = RowCounts::new(vec![1, 2, 0, 0, 0, 3, 4, 0, 5], 3);
        assert_eq!((counts.rows_from(0), counts.sent_by(2)), (&[1, 2, 0][..], 9));
        assert_eq!([0, 1, 2].map(|to| counts.received_by(to)), [5, 2, 8]);
        assert_eq!(counts.send_range_and_offset(2, 2), (4..9, 3));
        assert_eq!(counts.crossing_rows(), 9);
        let back = counts.reversed();
        assert_eq!(back.rows_from(2), [0, 3, 5]);
        for rank in 0..3 {
            assert_eq!(back.sent_by(rank), counts.received_by(rank));
            assert_eq!(back.received_by(rank), counts.sent_by(rank));
        }
        assert_eq!(back.reversed(), counts);
    }
}
