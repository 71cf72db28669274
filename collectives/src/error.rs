//! Errors of collectives.

use std::path::PathBuf;

use device::{DType, DeviceError};

use crate::CollectiveCall;

/// Error of a collective. The group has failed, except after `Shape`, `NotCapturable`, `RankTaken`, a
/// `Device` error of shape or dtype, and `Dtype` (unless a shared-memory group reports it for a gather,
/// all-to-all or broadcast).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A matrix dimension does not divide among the ranks.
    #[error("{collective}: {what} is {got}, which does not fit a group of {size} ranks")]
    Shape {
        /// Collective that rejected the matrix.
        collective: &'static str,
        /// Name of the dimension.
        what: &'static str,
        /// Value of the dimension.
        got: usize,
        /// Number of ranks of the group.
        size: usize,
    },
    /// Element type that the collective does not support.
    #[error("{collective} does not support dtype {dtype:?}")]
    Dtype {
        /// Collective that rejected the matrix.
        collective: &'static str,
        /// Element type of the matrix.
        dtype: DType,
    },
    /// A rank has failed: its process has exited, or it has reported a failure.
    #[error("rank {rank} left the group")]
    RankFailed {
        /// Failed rank.
        rank: usize,
    },
    /// A rank is alive but has not reached a collective within the timeout.
    #[error("rank {rank} has not reached {call} within {seconds} s")]
    RankTimeout {
        /// Rank that timed out.
        rank: usize,
        /// Call of the waiting rank.
        call: CollectiveCall,
        /// Timeout in seconds.
        seconds: u64,
    },
    /// Two ranks call different collectives: a bug.
    #[error("rank {rank} calls {theirs}, this rank calls {ours}")]
    Mismatch {
        /// Other rank.
        rank: usize,
        /// Call of the other rank.
        theirs: CollectiveCall,
        /// Call of this rank.
        ours: CollectiveCall,
    },
    /// The devices of the ranks have not connected within the timeout.
    #[error("the devices of the ranks have not connected within {seconds} s")]
    DevicesUnreachable {
        /// Timeout in seconds.
        seconds: u64,
    },
    /// A rank has no peer access to the memory of the other devices.
    #[error("rank {rank} has no peer access to the memory of the other devices")]
    NoPeerAccess {
        /// Rank without peer access.
        rank: usize,
    },
    /// A collective with sizes known only on the host cannot be captured into a graph.
    #[error("{collective} cannot be captured into a graph")]
    NotCapturable {
        /// Collective that was rejected.
        collective: &'static str,
    },
    /// The device, or the connection between devices, has failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The watchdog thread of the ranks could not be started.
    #[error("cannot start the watchdog thread of the ranks: {error}")]
    WatchdogStart {
        /// Error of the operating system.
        error: String,
    },
    /// The thread that watches the ranks has panicked, so that failures of ranks would not be detected.
    #[error("the watchdog thread of the ranks has panicked")]
    WatchdogPanicked,
    /// The creator of the group has aborted it.
    #[error("the group was aborted by its creator")]
    Aborted,
    /// The shared memory of the rendezvous cannot be used.
    #[error("{path}: {error}")]
    SharedMemory {
        /// Path of the shared memory.
        path: PathBuf,
        /// Reason.
        error: String,
    },
    /// The rank has been joined before, now or earlier, by this or another process.
    #[error("rank {rank} of this group has already joined")]
    RankTaken {
        /// Rank that was taken.
        rank: usize,
    },
}
