//! Errors of GPUs, of their runtime libraries and of kernel compilation.

use hip_runtime_sys::{DriverStatus, LibraryOpenError};

/// Error of a GPU, its runtime libraries or its compiler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// A library was not found, or lacks a required function.
    #[error(transparent)]
    Open(#[from] LibraryOpenError),
    /// The driver was opened, but the device does not exist.
    #[error("no device {requested}: {library} finds {found}")]
    NoDevice {
        /// Path of the driver library.
        library: String,
        /// Requested index of the device.
        requested: usize,
        /// Number of devices that the driver finds.
        found: usize,
    },
    /// The driver was opened, but environment variables hide the device.
    #[error("device {requested} is not visible: {variables} ({library} finds {found})")]
    DeviceNotVisible {
        /// Path of the driver library.
        library: String,
        /// Requested index of the device.
        requested: usize,
        /// Number of devices that the driver finds.
        found: usize,
        /// Variables that restrict the devices, with their values.
        variables: String,
    },
    /// A function of the driver or of the run-time compiler returned an error.
    #[error("{call} failed: {name} ({code})")]
    Call {
        /// Name of the function that returned the error.
        call: &'static str,
        /// Result code that the function returned.
        code: DriverStatus,
        /// Name of the result code.
        name: String,
    },
    /// The device or the host has too little memory for an allocation.
    #[error(
        "out of {place} memory on {device}: {bytes} bytes requested, {free_bytes} of {total_bytes} free"
    )]
    OutOfMemory {
        /// Kind of memory: `device`, or `pinned host`.
        place: &'static str,
        /// Number of bytes requested.
        bytes: usize,
        /// Number of free bytes of the device.
        free_bytes: u64,
        /// Total number of bytes of the device.
        total_bytes: u64,
        /// Description of the device that has too little free memory.
        device: String,
    },
    /// A kernel source could not be compiled.
    #[error("{file} does not compile for {arch} with {options}:\n{log}")]
    Compile {
        /// Name of the kernel source file.
        file: &'static str,
        /// Target architecture of the compilation.
        arch: String,
        /// Options that were passed to the compiler.
        options: String,
        /// Compiler log.
        log: String,
    },
    /// A compiled source does not contain the kernel.
    #[error("{file} has no kernel {kernel}")]
    NoFunction {
        /// Name of the kernel source file.
        file: &'static str,
        /// Name of the missing kernel.
        kernel: &'static str,
    },
    /// The GPU backend does not implement the kernel.
    #[error("no GPU kernel {kernel}")]
    NoKernel {
        /// Name of the kernel that is not implemented.
        kernel: &'static str,
    },
    /// The call is not allowed during graph capture.
    #[error("{call} is not allowed during graph capture")]
    Capturing {
        /// Name of the call that was rejected.
        call: &'static str,
    },
    /// The capture of a foreign host's stream is already invalidated, so no launch can join it.
    #[error("the graph capture of the host's stream is invalidated")]
    CaptureInvalidated,
    /// The stream index is out of range.
    #[error("no stream {stream}: the device has {streams}")]
    NoStream {
        /// Requested index of a stream.
        stream: usize,
        /// Number of streams of the device.
        streams: usize,
    },
    /// The driver lacks a function that is needed for peer access between ranks.
    #[error("the driver does not support {what}")]
    PeerAccessUnsupported {
        /// Name of the missing driver function.
        what: &'static str,
    },
    /// A rank has not published a handle of its peer memory.
    #[error("rank {rank} has published no peer memory")]
    NoPeerMemory {
        /// Index of the rank that has not published a handle.
        rank: usize,
    },
    /// Libraries are configured by path, and no collective library (RCCL or NCCL) is configured.
    #[error("no collective library (RCCL or NCCL) is configured")]
    NoCollectiveLibrary,
    /// The collective library is too old.
    #[error("{library} has version {version}, at least {oldest} is required")]
    OutdatedCollectiveLibrary {
        /// Path of the collective library.
        library: String,
        /// Version found: 10,000 × major + 100 × minor + patch.
        version: i32,
        /// Oldest supported version, in the same encoding as `version`.
        oldest: i32,
    },
    /// A function of RCCL or NCCL returned an error, which may be caused by this rank or by another rank.
    #[error("{call} of the collective library failed with status {status}: {what}")]
    Collective {
        /// Name of the RCCL or NCCL function.
        call: &'static str,
        /// Status code that the library returned.
        status: i32,
        /// Error message of the library.
        what: String,
    },
    /// The communicator was aborted and is unusable.
    #[error("the communicator was aborted")]
    CommunicatorAborted,
    /// A function of hipBLASLt or cuBLASLt returned an error.
    #[error("{call} of the BLASLt library failed with status {status}: {what}")]
    Blas {
        /// Name of the BLASLt function.
        call: &'static str,
        /// Status code that the library returned.
        status: i32,
        /// Sizes and types of the GEMM.
        what: String,
    },
}
