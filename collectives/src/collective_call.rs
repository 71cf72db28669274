//! Records of collective calls (all-reduce, all-gather, broadcast) in shared memory. Other ranks read the
//! records to detect mismatched calls; the process that monitors the group reads the records to report
//! stalled calls.

use std::fmt;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use device::{DType, MatRef};

/// Operation of a collective call. Each variant is named after the method of `CollectiveBackend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectiveOp {
    /// [`CollectiveBackend::all_reduce`](crate::CollectiveBackend::all_reduce)
    AllReduce,
    /// [`CollectiveBackend::all_gather`](crate::CollectiveBackend::all_gather)
    AllGather,
    /// [`CollectiveBackend::all_gather_rows`](crate::CollectiveBackend::all_gather_rows)
    AllGatherRows,
    /// [`CollectiveBackend::reduce_scatter`](crate::CollectiveBackend::reduce_scatter)
    ReduceScatter,
    /// [`CollectiveBackend::exchange_counts`](crate::CollectiveBackend::exchange_counts)
    ExchangeCounts,
    /// [`CollectiveBackend::all_to_all`](crate::CollectiveBackend::all_to_all)
    AllToAll,
    /// [`CollectiveBackend::broadcast`](crate::CollectiveBackend::broadcast) from the rank with this index.
    Broadcast(usize),
    /// [`CollectiveBackend::barrier`](crate::CollectiveBackend::barrier)
    Barrier,
    /// An operation code in shared memory that this version does not define.
    Unknown,
}

/// State of a collective call, as stored in the call's record in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectiveCallState {
    /// The call is in flight. A call that is launched on a GPU keeps this state until a
    /// [`LaunchedCollectives`](crate::LaunchedCollectives) confirms that the call has completed.
    InProgress,
    /// The call has completed.
    Done,
    /// The call has failed, so that the group of ranks has also failed.
    Failed,
}

/// Element type and size of the matrix that is passed to a collective call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CollectiveCallShape {
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl CollectiveCallShape {
    /// Shape of a collective call without data, such as a barrier.
    pub(crate) const EMPTY: Self = Self { dtype: DType::I32, rows: 0, cols: 0 };

    /// Shape of a collective call with the matrix `x`.
    pub(crate) fn of(x: MatRef<'_>) -> Self {
        Self { dtype: x.dtype(), rows: x.rows(), cols: x.cols() }
    }
}

/// Record of one collective call of a rank, which other ranks read in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveCall {
    /// Sequence number of the call among the calls of its group, starting at 1; it wraps to 0 after 2³²
    /// calls.
    pub sequence: u32,
    /// Operation of the collective call.
    pub op: CollectiveOp,
    /// Element type of the matrix that is passed to the call; meaningless for a barrier.
    pub dtype: DType,
    /// Number of rows of this rank's input matrix. For `all_gather_rows` this is the number of output rows;
    /// for `all_to_all` it is the total number of rows that are sent between different ranks.
    pub rows: u32,
    /// Number of columns of this rank's input matrix.
    pub cols: u32,
    /// State of the collective call.
    pub state: CollectiveCallState,
}

/// Operation code of a broadcast from rank 0. A broadcast from rank `r` has the code `FIRST_BROADCAST + r`.
const FIRST_BROADCAST: u32 = 16;

/// Number of 32-bit words of a call record in shared memory.
pub(crate) const CALL_WORDS: usize = 8;

impl CollectiveOp {
    /// Name of the operation in error messages and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::AllGatherRows => "all_gather_rows",
            Self::ReduceScatter => "reduce_scatter",
            Self::ExchangeCounts => "exchange_counts",
            Self::AllToAll => "all_to_all",
            Self::Broadcast(_) => "broadcast",
            Self::Barrier => "barrier",
            Self::Unknown => "unknown",
        }
    }

    fn to_word(self) -> u32 {
        match self {
            Self::AllReduce => 1,
            Self::AllGather => 2,
            Self::Barrier => 3,
            Self::AllGatherRows => 4,
            Self::ReduceScatter => 5,
            Self::AllToAll => 6,
            Self::ExchangeCounts => 7,
            Self::Broadcast(from) => FIRST_BROADCAST + from as u32,
            Self::Unknown => 0,
        }
    }

    fn from_word(word: u32) -> Self {
        match word {
            0 => Self::Unknown,
            1 => Self::AllReduce,
            2 => Self::AllGather,
            3 => Self::Barrier,
            4 => Self::AllGatherRows,
            5 => Self::ReduceScatter,
            6 => Self::AllToAll,
            7 => Self::ExchangeCounts,
            FIRST_BROADCAST.. => Self::Broadcast((word - FIRST_BROADCAST) as usize),
            _ => Self::Unknown,
        }
    }
}

impl CollectiveCall {
    /// Creates the record of a call in flight; the sequence number is assigned by
    /// `SharedMemoryGroup::record_call`.
    pub(crate) fn new(op: CollectiveOp, shape: CollectiveCallShape) -> Self {
        let CollectiveCallShape { dtype, rows, cols } = shape;
        let (rows, cols, state) = (rows as u32, cols as u32, CollectiveCallState::InProgress);
        Self { sequence: 0, op, dtype, rows, cols, state }
    }

    /// Writes the record to the words `to` in shared memory.
    pub(crate) fn write(&self, to: &[AtomicU32]) {
        let state = match self.state {
            CollectiveCallState::InProgress => 0,
            CollectiveCallState::Done => 1,
            CollectiveCallState::Failed => 2,
        };
        let (op, dtype) = (self.op.to_word(), dtype_word(self.dtype));
        let words = [self.sequence, op, dtype, self.rows, self.cols, state];
        for (to, word) in to.iter().zip(words) {
            to.store(word, Relaxed);
        }
    }

    /// Reads a record from shared memory. If the rank that made the call is writing the record at the same
    /// time, the fields may be inconsistent.
    pub(crate) fn read(from: &[AtomicU32]) -> Self {
        let word = |i: usize| from[i].load(Relaxed);
        let state = match word(5) {
            0 => CollectiveCallState::InProgress,
            1 => CollectiveCallState::Done,
            _ => CollectiveCallState::Failed,
        };
        let (op, dtype) = (CollectiveOp::from_word(word(1)), dtype_from_word(word(2)));
        Self { sequence: word(0), op, dtype, rows: word(3), cols: word(4), state }
    }
}

fn dtype_word(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        DType::F16 => 2,
        DType::F8E4M3 => 3,
        DType::I32 => 4,
        DType::I64 => 5,
    }
}

fn dtype_from_word(word: u32) -> DType {
    match word {
        1 => DType::BF16,
        2 => DType::F16,
        3 => DType::F8E4M3,
        4 => DType::I32,
        5 => DType::I64,
        _ => DType::F32,
    }
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, op, dtype, rows, cols, .. } = self;
        write!(f, "#{sequence} {}", op.name())?;
        match op {
            CollectiveOp::Barrier => Ok(()),
            CollectiveOp::Broadcast(from) => write!(f, " from {from} of {rows} x {cols} {dtype:?}"),
            _ => write!(f, " of {rows} x {cols} {dtype:?}"),
        }
    }
}
