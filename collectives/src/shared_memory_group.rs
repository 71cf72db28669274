//! Group of CPU ranks in processes that share memory: all-reduce, all-gather, reduce-scatter, all-to-all. The ranks may be on several
//! hosts (`tcp_mesh.rs`).
//!
//! Collective operations run in rounds. In each round, every rank writes a chunk of data to its slot, waits
//! until all ranks have written their slots, and computes the whole result from all slots in rank order. A
//! host has few CPU ranks, so this redundant computation takes less time than a second synchronisation.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};

use device::{DType, DeviceStream, HostSharedMemory, MatMut, MatRef, bf16, f16};

use crate::collective_call::{CALL_WORDS, CollectiveCallShape};
use crate::group_watchdog::GroupHealth;
use crate::peer_waiter::{PeerWaiter, abort_group, failed_rank};
use crate::shared_element::{
    MatrixChunk, ReducibleElement, SharedMemoryElement, is_reducible, row_of_chunk,
    split_into_chunks,
};
use crate::shared_layout::{GroupMemoryLayout, RankFlag, SLOT_WORDS};
use crate::tcp_mesh::{PostedChunk, TcpMesh};
use crate::{
    AllToAllRowCounts, CollectiveBackend, CollectiveCall, CollectiveCallState, CollectiveError,
    CollectiveOp,
};

/// Membership of one rank in a group of ranks that communicate through shared memory. Dropping this value
/// leaves the group, which makes the group fail on all other ranks.
#[derive(Debug)]
pub struct SharedMemoryGroup {
    /// Connections to the ranks of other hosts; `None` if all ranks are on this host.
    mesh: Option<TcpMesh>,
    memory: Arc<HostSharedMemory>,
    pub(crate) layout: GroupMemoryLayout,
    pub(crate) rank: usize,
    peer_waiter: PeerWaiter,
    /// Number of rounds (exchanges of one chunk between all ranks) that this rank has reached.
    rounds: Cell<u32>,
    calls: Cell<u32>,
    pub(crate) sum_buffer: RefCell<Vec<f32>>,
}

impl SharedMemoryGroup {
    pub(crate) fn join(
        memory: Arc<HostSharedMemory>,
        layout: GroupMemoryLayout,
        rank: usize,
        mesh: Option<TcpMesh>,
    ) -> Result<Self, CollectiveError> {
        let process = &memory.words()[layout.rank_flag(rank, RankFlag::ProcessId)];
        let joined = process.compare_exchange(0, std::process::id(), SeqCst, SeqCst);
        if joined.is_err() {
            return Err(CollectiveError::RankTaken { rank });
        }
        Ok(Self {
            mesh,
            memory,
            layout,
            rank,
            peer_waiter: PeerWaiter::new(layout.size),
            rounds: Cell::new(0),
            calls: Cell::new(0),
            sum_buffer: RefCell::default(),
        })
    }

    fn words(&self) -> &[AtomicU32] {
        self.memory.words()
    }

    fn flag(&self, rank: usize, flag: RankFlag) -> &AtomicU32 {
        &self.words()[self.layout.rank_flag(rank, flag)]
    }

    /// Runs a collective call and updates its record in shared memory when it starts, completes or fails.
    fn run_call(
        &self,
        op: CollectiveOp,
        shape: CollectiveCallShape,
        run: impl FnOnce(&CollectiveCall) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let call = self.record_call(CollectiveCall::new(op, shape));
        let result = run(&call);
        let state =
            if result.is_ok() { CollectiveCallState::Done } else { CollectiveCallState::Failed };
        CollectiveCall { state, ..call }
            .write(&self.words()[self.layout.call_record(self.rank, call.sequence)]);
        if let Err(error) = &result {
            self.abort_group(error);
        }
        result
    }

    /// Assigns a sequence number to a new call and writes its record to shared memory.
    pub(crate) fn record_call(&self, call: CollectiveCall) -> CollectiveCall {
        let sequence = self.calls.get().wrapping_add(1);
        self.calls.set(sequence);
        let call = CollectiveCall { sequence, ..call };
        call.write(&self.words()[self.layout.call_record(self.rank, sequence)]);
        self.flag(self.rank, RankFlag::CallsBegun).store(sequence, Release);
        call
    }

    /// Sequence number of the newest collective call of this rank.
    pub(crate) fn last_call(&self) -> u32 {
        self.calls.get()
    }

    /// Returns the failure state of this group, for the watchdog.
    pub(crate) fn health(&self) -> GroupHealth {
        GroupHealth::new(Arc::clone(&self.memory), self.layout, self.rank)
    }

    /// Aborts the group for all ranks and returns the error.
    pub(crate) fn fail(&self, error: CollectiveError) -> CollectiveError {
        self.abort_group(&error);
        error
    }

    /// Runs one round (exchange of one chunk between all ranks): fills this rank's slot with `write`, which returns the
    /// number of words that it has written at the start of the slot; it may also write the last word. Then
    /// waits until all other ranks have filled their slots. Returns the index of the slot that this round
    /// uses on every rank.
    pub(crate) fn round(
        &self,
        call: &CollectiveCall,
        chunk: u32,
        write: impl FnOnce(&[AtomicU32]) -> usize,
    ) -> Result<usize, CollectiveError> {
        let round = self.rounds.get().wrapping_add(1);
        self.rounds.set(round);
        let slot = round as usize % 2;
        let words = write(self.slot(self.rank, slot));
        let header = self.slot_header(self.rank, slot);
        call.write(header);
        header[CALL_WORDS].store(chunk, Relaxed);
        PeerWaiter::post_round(self.words(), &self.layout, self.rank, round);
        if let Some(mesh) = &self.mesh {
            let chunk = PostedChunk { round, words, header, slot: self.slot(self.rank, slot) };
            mesh.send(&chunk)?;
        }
        for peer in (0..self.layout.size).filter(|&peer| peer != self.rank) {
            self.peer_waiter.wait_for_round(self.words(), &self.layout, peer, round, call)?;
            let header = self.slot_header(peer, slot);
            let theirs = CollectiveCall::read(header);
            if theirs != *call || header[CALL_WORDS].load(Relaxed) != chunk {
                return Err(CollectiveError::Mismatch { rank: peer, theirs, ours: *call });
            }
        }
        Ok(slot)
    }

    pub(crate) fn slot(&self, rank: usize, slot: usize) -> &[AtomicU32] {
        &self.words()[self.layout.slot(rank, slot)]
    }

    fn slot_header(&self, rank: usize, slot: usize) -> &[AtomicU32] {
        &self.words()[self.layout.slot_header(rank, slot)]
    }

    /// Processes `x` chunk by chunk. If `is_sender` is true, writes each chunk to this rank's slot. Calls
    /// `finish` with each chunk and its slot index after all ranks have completed the round.
    fn post_chunks<T: SharedMemoryElement>(
        &self,
        call: &CollectiveCall,
        x: &mut MatMut<'_>,
        is_sender: bool,
        mut finish: impl FnMut(&mut MatMut<'_>, &MatrixChunk, usize),
    ) -> Result<(), CollectiveError> {
        for (i, chunk) in (0..).zip(split_into_chunks::<T>(x.rows(), x.cols(), SLOT_WORDS)) {
            let slot = self.round(call, i, |words| {
                if is_sender { write_chunk::<T>(x.as_ref(), &chunk, words) } else { 0 }
            })?;
            finish(x, &chunk, slot);
        }
        Ok(())
    }

    fn reduce_chunks<T: ReducibleElement>(
        &self,
        call: &CollectiveCall,
        mut x: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let mut sums = self.sum_buffer.borrow_mut();
        self.post_chunks::<T>(call, &mut x, true, |x, chunk, slot| {
            let (cols, width) = (chunk.cols.len(), T::words(chunk.cols.len()));
            sums.clear();
            sums.resize(chunk.rows.len() * cols, 0.0);
            for rank in 0..self.layout.size {
                let rows = sums.chunks_exact_mut(cols).zip(chunk.rows.clone());
                let words = self.slot(rank, slot).chunks_exact(width);
                for ((sum, row), words) in rows.zip(words) {
                    if rank == self.rank {
                        T::add_row(sum, row_of_chunk::<T>(x, row, chunk));
                    } else {
                        T::add_words(sum, words);
                    }
                }
            }
            for (sum, row) in sums.chunks_exact(cols).zip(chunk.rows.clone()) {
                T::store(sum, row_of_chunk::<T>(x, row, chunk));
            }
        })
    }

    fn gather_columns<T: SharedMemoryElement>(
        &self,
        call: &CollectiveCall,
        own: MatRef<'_>,
        all: &mut MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        for (i, chunk) in (0..).zip(split_into_chunks::<T>(own.rows(), own.cols(), SLOT_WORDS)) {
            let slot = self.round(call, i, |words| write_chunk::<T>(own, &chunk, words))?;
            let width = T::words(chunk.cols.len());
            for rank in 0..self.layout.size {
                let first = (rank * own.cols() + chunk.cols.start).min(all.cols());
                let end = (rank * own.cols() + chunk.cols.end).min(all.cols());
                let words = self.slot(rank, slot).chunks_exact(width);
                for (row, words) in chunk.rows.clone().zip(words) {
                    let to = &mut all.row_mut::<T>(row)[first..end];
                    if rank == self.rank {
                        to.copy_from_slice(&own.row::<T>(row)[chunk.cols.clone()][..to.len()]);
                    } else {
                        T::read_words(words, to);
                    }
                }
            }
        }
        Ok(())
    }

    fn broadcast_chunks<T: SharedMemoryElement>(
        &self,
        call: &CollectiveCall,
        mut x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError> {
        let is_sender = from == self.rank;
        self.post_chunks::<T>(call, &mut x, is_sender, |x, chunk, slot| {
            if !is_sender {
                let words = self.slot(from, slot).chunks_exact(T::words(chunk.cols.len()));
                for (row, words) in chunk.rows.clone().zip(words) {
                    T::read_words(words, row_of_chunk::<T>(x, row, chunk));
                }
            }
        })
    }

    /// Ends all waits of the group, and stores the index of the rank that caused the failure.
    fn abort_group(&self, error: &CollectiveError) {
        abort_group(self.words(), &self.layout, self.rank, error);
        if let Some(mesh) = &self.mesh {
            mesh.abort(failed_rank(self.rank, error));
        }
    }
}

impl CollectiveBackend for SharedMemoryGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.layout.size
    }

    fn all_reduce(&self, _: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        if !is_reducible(dtype) {
            return Err(CollectiveError::Dtype { collective: "all_reduce", dtype });
        }
        let shape = CollectiveCallShape::of(x.as_ref());
        self.run_call(CollectiveOp::AllReduce, shape, |call| match dtype {
            DType::BF16 => self.reduce_chunks::<bf16>(call, x),
            DType::F16 => self.reduce_chunks::<f16>(call, x),
            _ => self.reduce_chunks::<f32>(call, x),
        })
    }

    fn all_gather(
        &self,
        _: &DeviceStream,
        own: MatRef<'_>,
        mut all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let dtype = own.dtype();
        let shape = CollectiveCallShape::of(own);
        self.run_call(CollectiveOp::AllGather, shape, |call| match dtype {
            DType::F32 => self.gather_columns::<f32>(call, own, &mut all),
            DType::BF16 => self.gather_columns::<bf16>(call, own, &mut all),
            DType::F16 => self.gather_columns::<f16>(call, own, &mut all),
            DType::I32 => self.gather_columns::<i32>(call, own, &mut all),
            dtype => Err(CollectiveError::Dtype { collective: "all_gather", dtype }),
        })
    }

    fn all_gather_rows(
        &self,
        _: &DeviceStream,
        own: MatRef<'_>,
        mut all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let dtype = own.dtype();
        let shape = CollectiveCallShape { rows: all.rows(), ..CollectiveCallShape::of(own) };
        self.run_call(CollectiveOp::AllGatherRows, shape, |call| match dtype {
            DType::F32 => self.gather_rows::<f32>(call, own, &mut all),
            DType::BF16 => self.gather_rows::<bf16>(call, own, &mut all),
            DType::F16 => self.gather_rows::<f16>(call, own, &mut all),
            DType::I32 => self.gather_rows::<i32>(call, own, &mut all),
            dtype => Err(CollectiveError::Dtype { collective: "all_gather_rows", dtype }),
        })
    }

    fn reduce_scatter(
        &self,
        _: &DeviceStream,
        x: MatRef<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        if !is_reducible(dtype) {
            return Err(CollectiveError::Dtype { collective: "reduce_scatter", dtype });
        }
        let shape = CollectiveCallShape::of(x);
        self.run_call(CollectiveOp::ReduceScatter, shape, |call| match dtype {
            DType::BF16 => self.reduce_scatter_rows::<bf16>(call, x, own),
            DType::F16 => self.reduce_scatter_rows::<f16>(call, x, own),
            _ => self.reduce_scatter_rows::<f32>(call, x, own),
        })
    }

    fn exchange_counts(&self, to: &[usize]) -> Result<AllToAllRowCounts, CollectiveError> {
        let mut counts = None;
        let shape = CollectiveCallShape { dtype: DType::I32, rows: 1, cols: self.layout.size };
        self.run_call(CollectiveOp::ExchangeCounts, shape, |call| {
            counts = Some(self.exchange_row_counts(call, to)?);
            Ok(())
        })?;
        Ok(counts.expect("a successful call has set the counts"))
    }

    /// The call record contains the total number of rows that are sent between different ranks, so that a
    /// mismatch of `counts` between ranks is detected.
    fn all_to_all(
        &self,
        _: &DeviceStream,
        x: MatRef<'_>,
        mut y: MatMut<'_>,
        counts: &AllToAllRowCounts,
    ) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        let shape = CollectiveCallShape {
            rows: counts.rows_to_other_ranks(),
            ..CollectiveCallShape::of(x)
        };
        self.run_call(CollectiveOp::AllToAll, shape, |call| match dtype {
            DType::F32 => self.all_to_all_rows::<f32>(call, x, &mut y, counts),
            DType::BF16 => self.all_to_all_rows::<bf16>(call, x, &mut y, counts),
            DType::F16 => self.all_to_all_rows::<f16>(call, x, &mut y, counts),
            DType::I32 => self.all_to_all_rows::<i32>(call, x, &mut y, counts),
            dtype => Err(CollectiveError::Dtype { collective: "all_to_all", dtype }),
        })
    }

    fn broadcast(
        &self,
        _: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError> {
        let dtype = x.dtype();
        let shape = CollectiveCallShape::of(x.as_ref());
        self.run_call(CollectiveOp::Broadcast(from), shape, |call| match dtype {
            DType::F32 => self.broadcast_chunks::<f32>(call, x, from),
            DType::BF16 => self.broadcast_chunks::<bf16>(call, x, from),
            DType::F16 => self.broadcast_chunks::<f16>(call, x, from),
            DType::I32 => self.broadcast_chunks::<i32>(call, x, from),
            dtype => Err(CollectiveError::Dtype { collective: "broadcast", dtype }),
        })
    }

    fn barrier(&self, _: &DeviceStream) -> Result<(), CollectiveError> {
        self.run_call(CollectiveOp::Barrier, CollectiveCallShape::EMPTY, |call| {
            self.round(call, 0, |_| 0).map(drop)
        })
    }
}

impl Drop for SharedMemoryGroup {
    fn drop(&mut self) {
        self.flag(self.rank, RankFlag::HasLeft).store(1, SeqCst);
        PeerWaiter::wake_waiters(self.flag(self.rank, RankFlag::RoundsPosted));
    }
}

/// Encodes a chunk of a matrix as 32-bit words of shared memory. Returns the number of words.
pub(crate) fn write_chunk<T: SharedMemoryElement>(
    x: MatRef<'_>,
    chunk: &MatrixChunk,
    words: &[AtomicU32],
) -> usize {
    let width = T::words(chunk.cols.len());
    for (row, words) in chunk.rows.clone().zip(words.chunks_exact(width)) {
        T::write_words(&x.row::<T>(row)[chunk.cols.clone()], words);
    }
    chunk.rows.len() * width
}
