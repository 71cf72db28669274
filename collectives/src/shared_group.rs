//! A rank of a group whose processes share memory.
//!
//! Everybody brings a piece to a round, waits until all have, and computes the whole result from all slots in
//! the order of ranks: the ranks of a CPU are few, and none has to be waited for a second time.

use crate::call::CALL_WORDS;
use crate::lane::{Lane, Piece, Summand, is_summed, part, pieces};
use crate::layout::{Flag, Place, SLOT_WORDS};
use crate::waiting::{Waiting, give_up};
use crate::watch::Health;
use crate::{Call, CallState, Collective, CollectiveError, Operation, RowCounts};
use kernels::{DType, Mat, MatMut, SharedMemory, Stream, bf16, f16};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};

/// One rank. Dropping it leaves the group, which ends it for the others.
#[derive(Debug)]
pub struct SharedGroup {
    memory: Arc<SharedMemory>,
    pub(crate) place: Place,
    pub(crate) rank: usize,
    waiting: Waiting,
    /// Rounds come to, and calls begun.
    rounds: Cell<u32>,
    calls: Cell<u32>,
    pub(crate) sums: RefCell<Vec<f32>>,
}

impl SharedGroup {
    pub(crate) fn join(
        memory: Arc<SharedMemory>,
        place: Place,
        rank: usize,
    ) -> Result<Self, CollectiveError> {
        let process = &memory.words()[place.flag(rank, Flag::Process)];
        let joined = process.compare_exchange(0, std::process::id(), SeqCst, SeqCst);
        if joined.is_err() {
            return Err(CollectiveError::Taken { rank });
        }
        Ok(Self {
            memory,
            place,
            rank,
            waiting: Waiting::new(place.size),
            rounds: Cell::new(0),
            calls: Cell::new(0),
            sums: RefCell::default(),
        })
    }

    fn words(&self) -> &[AtomicU32] {
        self.memory.words()
    }

    fn flag(&self, rank: usize, flag: Flag) -> &AtomicU32 {
        &self.words()[self.place.flag(rank, flag)]
    }

    /// Runs a call, with a note of how it went where others can read it.
    fn call(
        &self,
        operation: Operation,
        (dtype, rows, cols): (DType, usize, usize),
        run: impl FnOnce(&Call) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let call = self.note(Call::new(operation, dtype, rows, cols));
        let result = run(&call);
        let state = if result.is_ok() { CallState::Done } else { CallState::Failed };
        Call { state, ..call }.write(&self.words()[self.place.call(self.rank, call.sequence)]);
        if let Err(error) = &result {
            self.give_up(error);
        }
        result
    }

    /// Notes that a call begins, where others can read it, and gives it its number.
    pub(crate) fn note(&self, call: Call) -> Call {
        let sequence = self.calls.get().wrapping_add(1);
        self.calls.set(sequence);
        let call = Call { sequence, ..call };
        call.write(&self.words()[self.place.call(self.rank, sequence)]);
        self.flag(self.rank, Flag::Calls).store(sequence, Release);
        call
    }

    /// The number of the newest call.
    pub(crate) fn newest(&self) -> u32 {
        self.calls.get()
    }

    /// What others need to look after this group.
    pub(crate) fn health(&self) -> Health {
        Health::new(Arc::clone(&self.memory), self.place, self.rank)
    }

    /// Ends the group for all.
    pub(crate) fn fail(&self, error: CollectiveError) -> CollectiveError {
        self.give_up(&error);
        error
    }

    /// One round: brings a piece, waits for those of all others, and returns the slots they lie in.
    pub(crate) fn round(
        &self,
        call: &Call,
        piece: u32,
        put: impl FnOnce(&[AtomicU32]),
    ) -> Result<usize, CollectiveError> {
        let round = self.rounds.get().wrapping_add(1);
        self.rounds.set(round);
        let slot = round as usize % 2;
        put(self.slot(self.rank, slot));
        let about = self.about(self.rank, slot);
        call.write(about);
        about[CALL_WORDS].store(piece, Relaxed);
        // Behind all that was written; and sequentially consistent, like the sleeper's count: one of the two sees the
        // other's store.
        self.flag(self.rank, Flag::Posted).store(round, SeqCst);
        if self.flag(self.rank, Flag::Asleep).load(SeqCst) > 0 {
            Waiting::wake(self.flag(self.rank, Flag::Posted));
        }
        for peer in (0..self.place.size).filter(|&peer| peer != self.rank) {
            self.waiting.until(self.words(), &self.place, peer, round, call)?;
            let about = self.about(peer, slot);
            let theirs = Call::read(about);
            if theirs != *call || about[CALL_WORDS].load(Relaxed) != piece {
                return Err(CollectiveError::Mismatch { rank: peer, theirs, ours: *call });
            }
        }
        Ok(slot)
    }

    pub(crate) fn slot(&self, rank: usize, slot: usize) -> &[AtomicU32] {
        &self.words()[self.place.slot(rank, slot)]
    }

    fn about(&self, rank: usize, slot: usize) -> &[AtomicU32] {
        &self.words()[self.place.of_slot(rank, slot)]
    }

    /// Brings `x` piece by piece; `finish` is told the slots of each.
    fn bring<T: Lane>(
        &self,
        call: &Call,
        x: &mut MatMut<'_>,
        brings: bool,
        mut finish: impl FnMut(&mut MatMut<'_>, &Piece, usize),
    ) -> Result<(), CollectiveError> {
        for (i, piece) in (0..).zip(pieces::<T>(x.rows(), x.cols(), SLOT_WORDS)) {
            let slot = self.round(call, i, |words| {
                if brings {
                    put::<T>(x.as_ref(), &piece, words);
                }
            })?;
            finish(x, &piece, slot);
        }
        Ok(())
    }

    fn sum<T: Summand>(&self, call: &Call, mut x: MatMut<'_>) -> Result<(), CollectiveError> {
        let mut sums = self.sums.borrow_mut();
        self.bring::<T>(call, &mut x, true, |x, piece, slot| {
            let (cols, width) = (piece.cols.len(), T::words(piece.cols.len()));
            sums.clear();
            sums.resize(piece.rows.len() * cols, 0.0);
            for rank in 0..self.place.size {
                let rows = sums.chunks_exact_mut(cols).zip(piece.rows.clone());
                let words = self.slot(rank, slot).chunks_exact(width);
                for ((sum, row), words) in rows.zip(words) {
                    if rank == self.rank {
                        T::add_row(sum, part::<T>(x, row, piece));
                    } else {
                        T::add_words(sum, words);
                    }
                }
            }
            for (sum, row) in sums.chunks_exact(cols).zip(piece.rows.clone()) {
                T::store(sum, part::<T>(x, row, piece));
            }
        })
    }

    fn gather<T: Lane>(
        &self,
        call: &Call,
        own: Mat<'_>,
        all: &mut MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        for (i, piece) in (0..).zip(pieces::<T>(own.rows(), own.cols(), SLOT_WORDS)) {
            let slot = self.round(call, i, |words| put::<T>(own, &piece, words))?;
            let width = T::words(piece.cols.len());
            for rank in 0..self.place.size {
                let first = (rank * own.cols() + piece.cols.start).min(all.cols());
                let end = (rank * own.cols() + piece.cols.end).min(all.cols());
                let words = self.slot(rank, slot).chunks_exact(width);
                for (row, words) in piece.rows.clone().zip(words) {
                    let to = &mut all.row_mut::<T>(row)[first..end];
                    if rank == self.rank {
                        to.copy_from_slice(&own.row::<T>(row)[piece.cols.clone()][..to.len()]);
                    } else {
                        T::take(words, to);
                    }
                }
            }
        }
        Ok(())
    }

    fn share<T: Lane>(
        &self,
        call: &Call,
        mut x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError> {
        let brings = from == self.rank;
        self.bring::<T>(call, &mut x, brings, |x, piece, slot| {
            if !brings {
                let words = self.slot(from, slot).chunks_exact(T::words(piece.cols.len()));
                for (row, words) in piece.rows.clone().zip(words) {
                    T::take(words, part::<T>(x, row, piece));
                }
            }
        })
    }

    /// Tells the others that nobody needs to wait any more, and whose fault it is.
    fn give_up(&self, error: &CollectiveError) {
        give_up(self.words(), &self.place, self.rank, error);
    }
}

impl Collective for SharedGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.place.size
    }

    fn all_reduce(&self, _: &Stream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        if !is_summed(dtype) {
            return Err(CollectiveError::Dtype { collective: "all_reduce", dtype });
        }
        let what = (dtype, x.rows(), x.cols());
        self.call(Operation::AllReduce, what, |call| match dtype {
            DType::BF16 => self.sum::<bf16>(call, x),
            DType::F16 => self.sum::<f16>(call, x),
            _ => self.sum::<f32>(call, x),
        })
    }

    fn all_gather(
        &self,
        _: &Stream,
        own: Mat<'_>,
        mut all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let dtype = own.dtype();
        let what = (dtype, own.rows(), own.cols());
        self.call(Operation::AllGather, what, |call| match dtype {
            DType::F32 => self.gather::<f32>(call, own, &mut all),
            DType::BF16 => self.gather::<bf16>(call, own, &mut all),
            DType::F16 => self.gather::<f16>(call, own, &mut all),
            DType::I32 => self.gather::<i32>(call, own, &mut all),
            dtype => Err(CollectiveError::Dtype { collective: "all_gather", dtype }),
        })
    }

    fn all_gather_rows(
        &self,
        _: &Stream,
        own: Mat<'_>,
        mut all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let dtype = own.dtype();
        let what = (dtype, all.rows(), own.cols());
        self.call(Operation::AllGatherRows, what, |call| match dtype {
            DType::F32 => self.gather_rows::<f32>(call, own, &mut all),
            DType::BF16 => self.gather_rows::<bf16>(call, own, &mut all),
            DType::F16 => self.gather_rows::<f16>(call, own, &mut all),
            DType::I32 => self.gather_rows::<i32>(call, own, &mut all),
            dtype => Err(CollectiveError::Dtype { collective: "all_gather_rows", dtype }),
        })
    }

    fn reduce_scatter(
        &self,
        _: &Stream,
        x: Mat<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        if !is_summed(dtype) {
            return Err(CollectiveError::Dtype { collective: "reduce_scatter", dtype });
        }
        let what = (dtype, x.rows(), x.cols());
        self.call(Operation::ReduceScatter, what, |call| match dtype {
            DType::BF16 => self.scatter::<bf16>(call, x, own),
            DType::F16 => self.scatter::<f16>(call, x, own),
            _ => self.scatter::<f32>(call, x, own),
        })
    }

    fn exchange_counts(&self, to: &[usize]) -> Result<RowCounts, CollectiveError> {
        let (size, mut counts) = (self.place.size, None);
        self.call(Operation::ExchangeCounts, (DType::I32, 1, size), |call| {
            counts = Some(self.tell_counts(call, to)?);
            Ok(())
        })?;
        Ok(counts.expect("a call that succeeds has counted"))
    }

    /// The call says how many rows go to other ranks in all: who knows of other counts is found out.
    fn all_to_all(
        &self,
        _: &Stream,
        x: Mat<'_>,
        mut y: MatMut<'_>,
        counts: &RowCounts,
    ) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        self.call(Operation::AllToAll, (dtype, counts.crossing(), x.cols()), |call| match dtype {
            DType::F32 => self.exchange::<f32>(call, x, &mut y, counts),
            DType::BF16 => self.exchange::<bf16>(call, x, &mut y, counts),
            DType::F16 => self.exchange::<f16>(call, x, &mut y, counts),
            DType::I32 => self.exchange::<i32>(call, x, &mut y, counts),
            dtype => Err(CollectiveError::Dtype { collective: "all_to_all", dtype }),
        })
    }

    fn broadcast(&self, _: &Stream, x: MatMut<'_>, from: usize) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        let what = (dtype, x.rows(), x.cols());
        self.call(Operation::Broadcast(from), what, |call| match dtype {
            DType::F32 => self.share::<f32>(call, x, from),
            DType::BF16 => self.share::<bf16>(call, x, from),
            DType::F16 => self.share::<f16>(call, x, from),
            DType::I32 => self.share::<i32>(call, x, from),
            dtype => Err(CollectiveError::Dtype { collective: "broadcast", dtype }),
        })
    }

    fn barrier(&self, _: &Stream) -> Result<(), CollectiveError> {
        let nothing = (DType::I32, 0, 0);
        self.call(Operation::Barrier, nothing, |call| self.round(call, 0, |_| {}).map(drop))
    }
}

impl Drop for SharedGroup {
    fn drop(&mut self) {
        self.flag(self.rank, Flag::Left).store(1, SeqCst);
        Waiting::wake(self.flag(self.rank, Flag::Posted));
    }
}

/// Part of a matrix to words.
pub(crate) fn put<T: Lane>(x: Mat<'_>, piece: &Piece, words: &[AtomicU32]) {
    let width = T::words(piece.cols.len());
    for (row, words) in piece.rows.clone().zip(words.chunks_exact(width)) {
        T::put(&x.row::<T>(row)[piece.cols.clone()], words);
    }
}
