//! Errors of GPUs.

use hip_runtime_sys::{DriverStatus, LibraryOpenError};

/// Error of a GPU, its runtime libraries or its compiler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// A library is missing, or lacks a required symbol.
    #[error(transparent)]
    Open(#[from] LibraryOpenError),
    /// The driver was opened, but the device does not exist.
    #[error("no device {requested}: {library} finds {found}")]
    NoDevice {
        /// Path of the driver library.
        library: String,
        /// Requested device index.
        requested: usize,
        /// Number of devices found.
        found: usize,
    },
    /// A call of the driver or the run-time compiler failed.
    #[error("{call} failed: {name} ({code})")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Result code.
        code: DriverStatus,
        /// Name of the result code.
        name: String,
    },
    /// Out of device or pinned host memory.
    #[error(
        "out of {place} memory on {device}: {bytes} bytes requested, {free_bytes} of {total_bytes} free"
    )]
    OutOfMemory {
        /// `device`, or `pinned host`.
        place: &'static str,
        /// Requested bytes.
        bytes: usize,
        /// Free bytes of the device.
        free_bytes: u64,
        /// Total bytes of the device.
        total_bytes: u64,
        /// Description of the device.
        device: String,
    },
    /// A kernel source does not compile.
    #[error("{file} does not compile for {arch} with {options}:\n{log}")]
    Compile {
        /// Name of the source file.
        file: &'static str,
        /// Target architecture.
        arch: String,
        /// Compiler options.
        options: String,
        /// Compiler log.
        log: String,
    },
    /// A compiled source lacks a kernel.
    #[error("{file} has no kernel {kernel}")]
    NoFunction {
        /// Name of the source file.
        file: &'static str,
        /// Name of the kernel.
        kernel: &'static str,
    },
    /// The GPU backend does not implement the kernel.
    #[error("no GPU kernel {kernel}")]
    NoKernel {
        /// Name of the kernel.
        kernel: &'static str,
    },
    /// The call is not allowed during graph capture.
    #[error("{call} is not allowed during graph capture")]
    Capturing {
        /// Name of the call.
        call: &'static str,
    },
    /// The stream index is out of range.
    #[error("no stream {stream}: the device has {streams}")]
    NoStream {
        /// Requested stream index.
        stream: usize,
        /// Number of streams of the device.
        streams: usize,
    },
    /// The driver lacks a function for peer access between ranks.
    #[error("the driver does not support {what}")]
    PeerAccessUnsupported {
        /// Missing function.
        what: &'static str,
    },
    /// A rank has published no peer memory.
    #[error("rank {rank} has published no peer memory")]
    NoPeerMemory {
        /// Index of the rank.
        rank: usize,
    },
    /// The libraries were configured by path, without a collective library (RCCL or NCCL).
    #[error("no collective library (RCCL or NCCL) is configured")]
    NoCollectiveLibrary,
    /// The collective library is too old.
    #[error("{library} has version {version}, at least {oldest} is required")]
    OutdatedCollectiveLibrary {
        /// Path of the library.
        library: String,
        /// Version found: 10,000 × major + 100 × minor + patch.
        version: i32,
        /// Oldest supported version, encoded as `version`.
        oldest: i32,
    },
    /// A call of the collective library failed, on this rank or on another rank.
    #[error("{call} of the collective library failed with status {status}: {what}")]
    Collective {
        /// Name of the call.
        call: &'static str,
        /// Status code of the library.
        status: i32,
        /// Error message of the library.
        what: String,
    },
    /// The communicator was aborted and is unusable.
    #[error("the communicator was aborted")]
    CommunicatorAborted,
    /// A call of the BLASLt library failed.
    #[error("{call} of the BLASLt library failed with status {status}: {what}")]
    Blas {
        /// Name of the call.
        call: &'static str,
        /// Status code of the library.
        status: i32,
        /// Description of the GEMM.
        what: String,
    },
}
