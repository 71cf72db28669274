//! Collective operations of [`SharedMemoryGroup`] in which the ranks have different rows, for expert
//! parallelism across replicas: row gather, reduce-scatter and all-to-all.

use std::sync::atomic::Ordering::Relaxed;

use device::{MatMut, MatRef};

use crate::shared_element::{
    MatrixChunk, ReducibleElement, SharedMemoryElement, row_of_chunk, split_into_chunks,
};
use crate::shared_layout::SLOT_WORDS;
use crate::shared_memory_group::{SharedMemoryGroup, write_chunk};
use crate::{AllToAllRowCounts, CollectiveCall, CollectiveError};

/// Number of 32-bit words of matrix data in a slot of shared memory if the last word of the slot contains the
/// number of rows.
const SLOT_WORDS_WITH_COUNT: usize = SLOT_WORDS - 1;

/// Location in shared memory of a row that a rank has sent.
#[derive(Debug, Clone, Copy)]
struct RowLocation {
    rank: usize,
    /// Index of the slot of the sending rank that contains the row.
    slot: usize,
    /// Index of the row in the matrix of the sending rank.
    row: usize,
}

impl SharedMemoryGroup {
    pub(crate) fn gather_rows<T: SharedMemoryElement>(
        &self,
        call: &CollectiveCall,
        own: MatRef<'_>,
        all: &mut MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let max_rows = all.rows() / self.layout.size;
        for (i, chunk) in
            (0..).zip(split_into_chunks::<T>(max_rows, own.cols(), SLOT_WORDS_WITH_COUNT))
        {
            let slot = self.round(call, i, |words| {
                words[SLOT_WORDS_WITH_COUNT].store(own.rows() as u32, Relaxed);
                write_chunk::<T>(own, &chunk.truncate_rows(own.rows()), words)
            })?;
            for rank in 0..self.layout.size {
                let words = self.slot(rank, slot);
                let row_count = words[SLOT_WORDS_WITH_COUNT].load(Relaxed) as usize;
                for row in chunk.rows.clone() {
                    let to = row_of_chunk::<T>(all, rank * max_rows + row, &chunk);
                    if row < row_count {
                        self.receive_row(RowLocation { rank, slot, row }, &chunk, own, to);
                    } else {
                        to.fill(T::PADDING);
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn reduce_scatter_rows<T: ReducibleElement>(
        &self,
        call: &CollectiveCall,
        x: MatRef<'_>,
        mut own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let first = x.rows() / self.layout.size * self.rank;
        let mut sums = self.sum_buffer.borrow_mut();
        for (i, chunk) in (0..).zip(split_into_chunks::<T>(x.rows(), x.cols(), SLOT_WORDS)) {
            let slot = self.round(call, i, |words| write_chunk::<T>(x, &chunk, words))?;
            let (cols, width) = (chunk.cols.clone(), T::words(chunk.cols.len()));
            let own_rows = chunk.rows.start.max(first)..chunk.rows.end.min(first + own.rows());
            for row in own_rows {
                sums.clear();
                sums.resize(cols.len(), 0.0);
                for rank in 0..self.layout.size {
                    if rank == self.rank {
                        T::add_row(&mut sums, &x.row::<T>(row)[cols.clone()]);
                    } else {
                        let at = (row - chunk.rows.start) * width;
                        T::add_words(&mut sums, &self.slot(rank, slot)[at..at + width]);
                    }
                }
                T::store(&sums, row_of_chunk::<T>(&mut own, row - first, &chunk));
            }
        }
        Ok(())
    }

    /// Sends the numbers of rows `to` that this rank will send to each rank, and returns the numbers of all
    /// ranks.
    pub(crate) fn exchange_row_counts(
        &self,
        call: &CollectiveCall,
        to: &[usize],
    ) -> Result<AllToAllRowCounts, CollectiveError> {
        let size = self.layout.size;
        let slot = self.round(call, 0, |words| {
            to.iter().zip(words).for_each(|(&rows, word)| word.store(rows as u32, Relaxed));
            size
        })?;
        let words = |rank| &self.slot(rank, slot)[..size];
        let rows = (0..size).flat_map(|rank| words(rank).iter().map(|w| w.load(Relaxed) as usize));
        Ok(AllToAllRowCounts::new(rows.collect(), size))
    }

    pub(crate) fn all_to_all_rows<T: SharedMemoryElement>(
        &self,
        call: &CollectiveCall,
        x: MatRef<'_>,
        y: &mut MatMut<'_>,
        counts: &AllToAllRowCounts,
    ) -> Result<(), CollectiveError> {
        let chunks_of = |rank| split_into_chunks::<T>(counts.sent_by(rank), x.cols(), SLOT_WORDS);
        let chunks_by_rank: Vec<Vec<MatrixChunk>> = (0..self.layout.size).map(chunks_of).collect();
        for i in 0..chunks_by_rank.iter().map(Vec::len).max().unwrap_or(0) {
            let slot = self.round(call, i as u32, |words| {
                let chunk = chunks_by_rank[self.rank].get(i);
                chunk.map_or(0, |chunk| write_chunk::<T>(x, chunk, words))
            })?;
            for (rank, chunks) in chunks_by_rank.iter().enumerate() {
                let Some(chunk) = chunks.get(i) else { continue };
                let (range, offset) = counts.send_range_and_offset(rank, self.rank);
                for row in chunk.rows.start.max(range.start)..chunk.rows.end.min(range.end) {
                    let to = row_of_chunk::<T>(y, offset + row - range.start, chunk);
                    self.receive_row(RowLocation { rank, slot, row }, chunk, x, to);
                }
            }
        }
        Ok(())
    }

    /// Copies a part of a row to `to`: the columns `chunk.cols` of the row at the location `from`. The row is
    /// read from the slot of the sending rank, or from the matrix `own` if this rank is the sender.
    fn receive_row<T: SharedMemoryElement>(
        &self,
        from: RowLocation,
        chunk: &MatrixChunk,
        own: MatRef<'_>,
        to: &mut [T],
    ) {
        let RowLocation { rank, slot, row } = from;
        if rank == self.rank {
            to.copy_from_slice(&own.row::<T>(row)[chunk.cols.clone()]);
        } else {
            let width = T::words(chunk.cols.len());
            let at = (row - chunk.rows.start) * width;
            T::read_words(&self.slot(rank, slot)[at..at + width], to);
        }
    }
}
