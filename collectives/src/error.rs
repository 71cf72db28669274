//! Why a collective failed.

use std::path::PathBuf;

use device::{DType, DeviceError};

use crate::CollectiveCall;

/// A collective that did not complete. All but `Shape` and `Dtype` mean that the group is of no further use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A matrix does not divide among the ranks.
    #[error("{collective}: {what} is {got}, which {size} ranks do not make up")]
    Shape {
        /// The collective that refused.
        collective: &'static str,
        /// The size in question.
        what: &'static str,
        /// Its value.
        got: usize,
        /// Ranks of the group.
        size: usize,
    },
    /// Elements that this collective does not take.
    #[error("{collective} does not take {dtype:?}")]
    Dtype {
        /// The collective that refused.
        collective: &'static str,
        /// Their type.
        dtype: DType,
    },
    /// A rank is gone: its process has ended, or it has failed and said so.
    #[error("rank {rank} left the group")]
    RankFailed {
        /// The rank.
        rank: usize,
    },
    /// A rank is there but does not come.
    #[error("rank {rank} has not come to {call} within {seconds} s")]
    RankTimeout {
        /// The rank.
        rank: usize,
        /// What it was waited for in.
        call: CollectiveCall,
        /// Time waited.
        seconds: u64,
    },
    /// Two ranks do different things: a bug.
    #[error("rank {rank} calls {theirs}, this one {ours}")]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// What it does.
        theirs: CollectiveCall,
        /// What this rank does.
        ours: CollectiveCall,
    },
    /// Ranks that have met do not reach each other's devices.
    #[error("the devices of the ranks have not reached each other within {seconds} s")]
    DevicesUnreachable {
        /// Time waited.
        seconds: u64,
    },
    /// A rank has no way to the memory of the others' devices.
    #[error("rank {rank} does not reach the memory of the other devices")]
    NoPeerAccess {
        /// The rank.
        rank: usize,
    },
    /// A collective whose sizes only the host knows cannot be part of a recording.
    #[error("{collective} cannot be recorded")]
    NotCapturable {
        /// The collective that refused.
        collective: &'static str,
    },
    /// The device failed, or the way between devices.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Nobody could be set to look after the ranks.
    #[error("no thread that looks after the ranks: {error}")]
    WatchdogStart {
        /// What the system said.
        error: String,
    },
    /// The thread that watches the ranks has panicked, so that failures of ranks would not be detected.
    #[error("the watchdog thread of the ranks has panicked")]
    WatchdogPanicked,
    /// Whoever made the group has given it up.
    #[error("the group was given up")]
    Aborted,
    /// The memory in which ranks meet cannot be used.
    #[error("{path}: {error}")]
    SharedMemory {
        /// Where it lies.
        path: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// The place is somebody else's, or was.
    #[error("rank {rank} of this group has joined before")]
    RankTaken {
        /// The rank.
        rank: usize,
    },
}
