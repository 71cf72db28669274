//! What can go wrong on a GPU.

use hip_runtime_sys::{DriverStatus, LibraryOpenError};

/// A GPU, its runtime or its compiler refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// A library is missing or not what its name says.
    #[error(transparent)]
    Open(#[from] LibraryOpenError),
    /// The driver is there, the device is not.
    #[error("no device {requested}: {library} finds {found}")]
    NoDevice {
        /// The driver's library.
        library: String,
        /// Index asked for.
        requested: usize,
        /// Devices found.
        found: usize,
    },
    /// A call failed.
    #[error("{call} failed: {name} ({code})")]
    Call {
        /// What was called.
        call: &'static str,
        /// The runtime's code.
        code: DriverStatus,
        /// Its name.
        name: String,
    },
    /// Memory is short.
    #[error(
        "out of {place} memory on {device}: {bytes} bytes asked for, {free_bytes} of {total_bytes} free"
    )]
    OutOfMemory {
        /// `device`, or `pinned host`.
        place: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// Bytes free on the device.
        free_bytes: u64,
        /// Bytes of the device.
        total_bytes: u64,
        /// The device, in words.
        device: String,
    },
    /// A kernel's source does not compile.
    #[error("{file} does not compile for {arch} with {options}:\n{log}")]
    Compile {
        /// The source.
        file: &'static str,
        /// Architecture.
        arch: String,
        /// Options of the compiler.
        options: String,
        /// What the compiler says.
        log: String,
    },
    /// A compiled source lacks an entry.
    #[error("{file} has no kernel {kernel}")]
    NoFunction {
        /// The source.
        file: &'static str,
        /// The kernel.
        kernel: &'static str,
    },
    /// This backend does not have the kernel.
    #[error("no GPU kernel {kernel}")]
    NoKernel {
        /// The kernel.
        kernel: &'static str,
    },
    /// Launches are being captured, and this cannot be part of a graph.
    #[error("{call} during the capture of a graph")]
    Capturing {
        /// What was called.
        call: &'static str,
    },
    /// There is no such stream.
    #[error("stream {stream} of {streams}")]
    NoStream {
        /// Index asked for.
        stream: usize,
        /// Streams of a device.
        streams: usize,
    },
    /// Ranks cannot reach each other's memory.
    #[error("the driver has no {what}")]
    PeerAccessUnsupported {
        /// What is missing.
        what: &'static str,
    },
    /// The memory of a rank is nowhere to be reached.
    #[error("rank {rank} offers no memory")]
    NoPeerMemory {
        /// The rank.
        rank: usize,
    },
    /// The libraries were named, and none of them combines what ranks have.
    #[error("no library for the collectives of GPUs was named")]
    NoCollectiveLibrary,
    /// The library that combines what ranks have is too old.
    #[error("{library} has version {version}, at least {oldest} is needed")]
    OutdatedCollectiveLibrary {
        /// The library.
        library: String,
        /// 10,000 times the major version, 100 times the minor, the patch.
        version: i32,
        /// As `version`.
        oldest: i32,
    },
    /// A call of the library that combines what ranks have failed, here or at another rank.
    #[error("{call} of the collective library failed with status {status}: {what}")]
    Collective {
        /// What was called.
        call: &'static str,
        /// The library's status.
        status: i32,
        /// In its words.
        what: String,
    },
    /// The communicator is of no further use.
    #[error("the communicator was aborted")]
    CommunicatorAborted,
    /// The matrix library failed.
    #[error("{call} of the matrix library failed with status {status}: {what}")]
    Blas {
        /// What was called.
        call: &'static str,
        /// The library's status.
        status: i32,
        /// The product, in words.
        what: String,
    },
}
