//! Collectives of ranks that each hold rows of their own: what [`SharedGroup`] does for experts spread over replicas.

use crate::lane::{Lane, Piece, Summand, part, pieces};
use crate::layout::SLOT_WORDS;
use crate::shared_group::{SharedGroup, put};
use crate::{Call, CollectiveError};
use kernels::{Mat, MatMut};
use std::ops::Range;
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

    pub(crate) fn exchange<T: Lane>(
        &self,
        call: &Call,
        x: Mat<'_>,
        to: &[usize],
        y: &mut MatMut<'_>,
    ) -> Result<Vec<usize>, CollectiveError> {
        let ways = self.tell_ways(call, to)?;
        let came = ways.to(self.rank);
        let rows: usize = came.iter().sum();
        if rows > y.rows() {
            let (collective, size) = (call.operation.name(), self.place.size);
            return Err(CollectiveError::Shape { collective, what: "rows", got: y.rows(), size });
        }
        let cut = |rank| pieces::<T>(ways.sent_by(rank), x.cols(), SLOT_WORDS);
        let cuts: Vec<Vec<Piece>> = (0..self.place.size).map(cut).collect();
        for i in 0..cuts.iter().map(Vec::len).max().unwrap_or(0) {
            let slot = self.round(call, i as u32 + 1, |words| {
                if let Some(piece) = cuts[self.rank].get(i) {
                    put::<T>(x, piece, words);
                }
            })?;
            for (rank, pieces) in cuts.iter().enumerate() {
                let Some(piece) = pieces.get(i) else { continue };
                let width = T::words(piece.cols.len());
                let (theirs, mine) = ways.between(rank, self.rank);
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
        Ok(came)
    }

    /// Tells all how many rows this rank has for each of them, and learns the same of the others.
    fn tell_ways(&self, call: &Call, to: &[usize]) -> Result<Ways, CollectiveError> {
        let size = self.place.size;
        let slot = self.round(call, 0, |words| {
            to.iter().zip(words).for_each(|(&rows, word)| word.store(rows as u32, Relaxed));
        })?;
        let words = |rank| &self.slot(rank, slot)[..size];
        let rows = (0..size).flat_map(|rank| words(rank).iter().map(|w| w.load(Relaxed) as usize));
        Ok(Ways { rows: rows.collect(), size })
    }
}

/// Rows that each rank has for each.
struct Ways {
    /// Of rank `r` for rank `q` at `r · size + q`.
    rows: Vec<usize>,
    size: usize,
}

impl Ways {
    /// What rank `from` sends, by receiver.
    fn from(&self, from: usize) -> &[usize] {
        &self.rows[from * self.size..(from + 1) * self.size]
    }

    /// What rank `to` gets, by sender.
    fn to(&self, to: usize) -> Vec<usize> {
        (0..self.size).map(|from| self.from(from)[to]).collect()
    }

    /// Rows that rank `from` sends in all.
    fn sent_by(&self, from: usize) -> usize {
        self.from(from).iter().sum()
    }

    /// The rows from one rank to another: where they lie in what is sent, and where they begin in what comes.
    fn between(&self, from: usize, to: usize) -> (Range<usize>, usize) {
        let start: usize = self.from(from)[..to].iter().sum();
        let before = (0..from).map(|rank| self.from(rank)[to]).sum();
        (start..start + self.from(from)[to], before)
    }
}
