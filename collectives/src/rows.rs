//! Collectives of ranks that each hold rows of their own: what [`SharedGroup`] does for experts spread over replicas.

use crate::lane::{Lane, Piece, Summand, part, pieces};
use crate::layout::SLOT_WORDS;
use crate::shared_group::{SharedGroup, put};
use crate::{Call, CollectiveError, RowCounts};
use kernels::{Mat, MatMut};
use std::sync::atomic::Ordering::Relaxed;

/// Words of a slot that hold a matrix where the last one says how many rows it has.
const COUNTED_WORDS: usize = SLOT_WORDS - 1;

impl SharedGroup {
    pub(crate) fn gather_rows<T: Lane>(
        &self,
        call: &Call,
        own: Mat<'_>,
        all: &mut MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let most = all.rows() / self.place.size;
        for (i, piece) in (0..).zip(pieces::<T>(most, own.cols(), COUNTED_WORDS)) {
            let slot = self.round(call, i, |words| {
                put::<T>(own, &piece.up_to(own.rows()), words);
                words[COUNTED_WORDS].store(own.rows() as u32, Relaxed);
            })?;
            let width = T::words(piece.cols.len());
            for rank in 0..self.place.size {
                let words = self.slot(rank, slot);
                let brought = words[COUNTED_WORDS].load(Relaxed) as usize;
                for (row, words) in piece.rows.clone().zip(words.chunks_exact(width)) {
                    let to = part::<T>(all, rank * most + row, &piece);
                    if row >= brought {
                        to.fill(T::BLANK);
                    } else if rank == self.rank {
                        to.copy_from_slice(&own.row::<T>(row)[piece.cols.clone()]);
                    } else {
                        T::take(words, to);
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn scatter<T: Summand>(
        &self,
        call: &Call,
        x: Mat<'_>,
        mut own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let first = x.rows() / self.place.size * self.rank;
        let mut sums = self.sums.borrow_mut();
        for (i, piece) in (0..).zip(pieces::<T>(x.rows(), x.cols(), SLOT_WORDS)) {
            let slot = self.round(call, i, |words| put::<T>(x, &piece, words))?;
            let (cols, width) = (piece.cols.clone(), T::words(piece.cols.len()));
            let wanted = piece.rows.start.max(first)..piece.rows.end.min(first + own.rows());
            for row in wanted {
                sums.clear();
                sums.resize(cols.len(), 0.0);
                for rank in 0..self.place.size {
                    if rank == self.rank {
                        T::add_row(&mut sums, &x.row::<T>(row)[cols.clone()]);
                    } else {
                        let at = (row - piece.rows.start) * width;
                        T::add_words(&mut sums, &self.slot(rank, slot)[at..at + width]);
                    }
                }
                T::store(&sums, part::<T>(&mut own, row - first, &piece));
            }
        }
        Ok(())
    }

    /// Tells all how many rows this rank has for each of them, and learns the same of the others.
    pub(crate) fn tell_counts(
        &self,
        call: &Call,
        to: &[usize],
    ) -> Result<RowCounts, CollectiveError> {
        let size = self.place.size;
        let slot = self.round(call, 0, |words| {
            to.iter().zip(words).for_each(|(&rows, word)| word.store(rows as u32, Relaxed));
        })?;
        let words = |rank| &self.slot(rank, slot)[..size];
        let rows = (0..size).flat_map(|rank| words(rank).iter().map(|w| w.load(Relaxed) as usize));
        Ok(RowCounts::new(rows.collect(), size))
    }

    pub(crate) fn exchange<T: Lane>(
        &self,
        call: &Call,
        x: Mat<'_>,
        y: &mut MatMut<'_>,
        counts: &RowCounts,
    ) -> Result<(), CollectiveError> {
        let cut = |rank| pieces::<T>(counts.sent_by(rank), x.cols(), SLOT_WORDS);
        let cuts: Vec<Vec<Piece>> = (0..self.place.size).map(cut).collect();
        for i in 0..cuts.iter().map(Vec::len).max().unwrap_or(0) {
            let slot = self.round(call, i as u32, |words| {
                if let Some(piece) = cuts[self.rank].get(i) {
                    put::<T>(x, piece, words);
                }
            })?;
            for (rank, pieces) in cuts.iter().enumerate() {
                let Some(piece) = pieces.get(i) else { continue };
                let width = T::words(piece.cols.len());
                let (theirs, mine) = counts.between(rank, self.rank);
                for row in piece.rows.start.max(theirs.start)..piece.rows.end.min(theirs.end) {
                    let to = part::<T>(y, mine + row - theirs.start, piece);
                    if rank == self.rank {
                        to.copy_from_slice(&x.row::<T>(row)[piece.cols.clone()]);
                    } else {
                        let at = (row - piece.rows.start) * width;
                        T::take(&self.slot(rank, slot)[at..at + width], to);
                    }
                }
            }
        }
        Ok(())
    }
}
