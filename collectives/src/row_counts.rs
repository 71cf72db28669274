//! Number of rows that each rank of a group sends to each rank in an all-to-all.

use std::ops::Range;

/// Number of rows that every rank sends to every rank, including itself. All ranks have the same values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllToAllRowCounts {
    /// Number of rows from rank `r` to rank `q`, at index `r · size + q`.
    rows: Vec<usize>,
    size: usize,
}

impl AllToAllRowCounts {
    /// Creates the counts of `size` ranks. `rows` contains the row counts of rank 0 for each destination
    /// rank, followed by the row counts of rank 1, and so on.
    pub(crate) fn new(rows: Vec<usize>, size: usize) -> Self {
        debug_assert_eq!(rows.len(), size * size);
        Self { rows, size }
    }

    /// Number of ranks of the group.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Numbers of rows that rank `from` sends to each rank.
    #[must_use]
    pub fn rows_from(&self, from: usize) -> &[usize] {
        &self.rows[from * self.size..(from + 1) * self.size]
    }

    /// Total number of rows that rank `from` sends, including rows that it sends to itself.
    #[must_use]
    pub fn sent_by(&self, from: usize) -> usize {
        self.rows_from(from).iter().sum()
    }

    /// Total number of rows that rank `to` receives, including rows that it sends to itself.
    #[must_use]
    pub fn received_by(&self, to: usize) -> usize {
        (0..self.size).map(|from| self.rows_from(from)[to]).sum()
    }

    /// Total number of rows that are sent between different ranks.
    #[must_use]
    pub fn rows_to_other_ranks(&self) -> usize {
        (0..self.size).map(|rank| self.sent_by(rank) - self.rows_from(rank)[rank]).sum()
    }

    /// Counts of the return exchange, in which each rank sends the received rows back to their source ranks.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let size = self.size;
        let transposed = |i| self.rows_from(i % size)[i / size];
        Self { rows: (0..size * size).map(transposed).collect(), size }
    }

    /// Returns the location of the rows that rank `from` sends to rank `to`: the range of these rows in all
    /// rows that `from` sends, and their offset in all rows that `to` receives.
    pub(crate) fn send_range_and_offset(&self, from: usize, to: usize) -> (Range<usize>, usize) {
        let start: usize = self.rows_from(from)[..to].iter().sum();
        let offset = (0..from).map(|rank| self.rows_from(rank)[to]).sum();
        (start..start + self.rows_from(from)[to], offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reversed_counts_return_the_rows() {
        let counts = AllToAllRowCounts::new(vec![1, 2, 0, 0, 0, 3, 4, 0, 5], 3);
        assert_eq!((counts.rows_from(0), counts.sent_by(2)), (&[1, 2, 0][..], 9));
        assert_eq!([0, 1, 2].map(|to| counts.received_by(to)), [5, 2, 8]);
        assert_eq!(counts.send_range_and_offset(2, 2), (4..9, 3));
        assert_eq!(counts.rows_to_other_ranks(), 9);
        let reversed = counts.reversed();
        assert_eq!(reversed.rows_from(2), [0, 3, 5]);
        for rank in 0..3 {
            assert_eq!(reversed.sent_by(rank), counts.received_by(rank));
            assert_eq!(reversed.received_by(rank), counts.sent_by(rank));
        }
        assert_eq!(reversed.reversed(), counts);
    }
}
