//! Errors of collective operations.

use std::path::PathBuf;

use device::{DType, DeviceError};

use crate::CollectiveCall;

/// Error of a collective operation. After an error, the group has failed and is unusable, with these
/// exceptions: `Shape`, `DtypeMismatch`, `NotCapturable`, `RankTaken`, a `Device` error of shape or dtype,
/// and `Dtype` (except from a gather, all-to-all or broadcast of a shared memory group, after which the group
/// has failed).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A dimension of a matrix does not fit the number of ranks.
    #[error("{collective}: {what} is {got}, which does not fit a group of {size} ranks")]
    Shape {
        /// Name of the collective that rejected the matrix.
        collective: &'static str,
        /// Name of the dimension that does not fit.
        what: &'static str,
        /// Value of the dimension that does not fit.
        got: usize,
        /// Number of ranks of the group.
        size: usize,
    },
    /// The matrices of this rank have different element types.
    #[error("{collective}: the input has dtype {input:?}, the output {output:?}")]
    DtypeMismatch {
        /// Name of the collective that rejected the matrices.
        collective: &'static str,
        /// Element type of the input.
        input: DType,
        /// Element type of the output.
        output: DType,
    },
    /// The collective does not support the element type.
    #[error("{collective} does not support dtype {dtype:?}")]
    Dtype {
        /// Name of the collective that rejected the matrix.
        collective: &'static str,
        /// Element type of the matrix.
        dtype: DType,
    },
    /// A rank has failed: its process has exited, or it has reported a failure.
    #[error("rank {rank} left the group")]
    RankFailed {
        /// Index of the rank that has failed.
        rank: usize,
    },
    /// A rank is alive, but has not called a collective within the timeout.
    #[error("rank {rank} has not reached {call} within {seconds} s")]
    RankTimeout {
        /// Index of the rank that timed out.
        rank: usize,
        /// Collective call of the waiting rank.
        call: CollectiveCall,
        /// Timeout in seconds of the waiting rank.
        seconds: u64,
    },
    /// Two ranks call different collective operations, because of a bug.
    #[error("rank {rank} calls {theirs}, this rank calls {ours}")]
    Mismatch {
        /// Index of the other rank.
        rank: usize,
        /// Collective call of the other rank.
        theirs: CollectiveCall,
        /// Collective call of this rank.
        ours: CollectiveCall,
    },
    /// The communicator of the devices was not created within the timeout.
    #[error("the devices of the ranks have not connected within {seconds} s")]
    DevicesUnreachable {
        /// Timeout in seconds for the creation of the communicator.
        seconds: u64,
    },
    /// A rank has no peer access to the memory of the other devices.
    #[error("rank {rank} has no peer access to the memory of the other devices")]
    NoPeerAccess {
        /// Index of the rank without peer access.
        rank: usize,
    },
    /// The collective cannot be captured into a graph, because its sizes are only known on the host.
    #[error("{collective} cannot be captured into a graph")]
    NotCapturable {
        /// Name of the collective that cannot be captured.
        collective: &'static str,
    },
    /// The device, or the connection between devices, has failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The watchdog thread, which monitors the ranks, could not be started.
    #[error("cannot start the watchdog thread of the ranks: {error}")]
    WatchdogStart {
        /// Error of the operating system.
        error: String,
    },
    /// The watchdog thread, which monitors the ranks, has panicked; rank failures would no longer be
    /// detected.
    #[error("the watchdog thread of the ranks has panicked")]
    WatchdogPanicked,
    /// The process that created the group has aborted it.
    #[error("the group was aborted by its creator")]
    Aborted,
    /// The shared memory of the rendezvous cannot be created, opened or mapped.
    #[error("{path}: {error}")]
    SharedMemory {
        /// Path of the shared memory file.
        path: PathBuf,
        /// Reason why the shared memory cannot be created, opened or mapped.
        error: String,
    },
    /// The communication of a foreign host's ranks failed.
    #[error("the all-gather of the host returned {status}")]
    HostExchange {
        /// Number that the function of the host returned.
        status: i32,
    },
    /// No listener for the ranks of other nodes can be opened.
    #[error(
        "cannot listen at {host} (--node-address, or --master-addr on node 0) for the ranks of other nodes: {error}"
    )]
    Listen {
        /// Name or address of this host.
        host: String,
        /// Error of the operating system.
        error: String,
    },
    /// A rank on another node does not accept a connection.
    #[error("rank {rank} at {address} is unreachable: {error}")]
    PeerUnreachable {
        /// World rank.
        rank: usize,
        /// Address of the rank.
        address: String,
        /// Error of the operating system.
        error: String,
    },
    /// A rank on another node has not connected.
    #[error("rank {rank} on another node has not connected within {seconds} s")]
    PeerMissing {
        /// World rank.
        rank: usize,
        /// Timeout in seconds.
        seconds: u64,
    },
    /// The connection to a rank on another node has failed.
    #[error("the connection to rank {rank} on another node failed: {error}")]
    LinkFailed {
        /// Index of the rank in the group.
        rank: usize,
        /// Error of the operating system.
        error: String,
    },
    /// The endpoint of a rank on another node is unknown.
    #[error("the endpoint of rank {rank} is unknown")]
    NoEndpoint {
        /// World rank.
        rank: usize,
    },
    /// Rank `rank` has already been joined, by this process or by another process.
    #[error("rank {rank} of this group has already joined")]
    RankTaken {
        /// Index of the rank that has already been joined.
        rank: usize,
    },
}
