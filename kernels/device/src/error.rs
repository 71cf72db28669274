//! Errors of devices: rejected kernel arguments, missing memory or instructions, and failures of a GPU.

use crate::DType;

/// Error of a device. `Shape` and `Unsupported` are errors of the caller, which are detected before any
/// memory is accessed. After any other error of a launch or a copy, the device must not be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device has too little free memory.
    #[error("out of memory: {bytes} bytes on {device}")]
    OutOfMemory {
        /// Number of bytes requested by the allocation.
        bytes: usize,
        /// Description of the device.
        device: &'static str,
    },
    /// The size of an argument does not match the other arguments.
    #[error("{kernel}: {what} is {got}, expected {expected}")]
    Shape {
        /// Kernel that rejected the arguments.
        kernel: &'static str,
        /// Name of the size that does not match, for the error message.
        what: &'static str,
        /// Actual value of the size.
        got: usize,
        /// Expected value of the size.
        expected: usize,
    },
    /// An index is out of range of the table or the KV pool that is indexed.
    #[error("{kernel}: {what} {index} is outside [0, {limit})")]
    Index {
        /// Kernel that rejected the arguments.
        kernel: &'static str,
        /// Name of the index that is out of range, for the error message.
        what: &'static str,
        /// Value of the invalid index.
        index: i64,
        /// One past the largest valid index.
        limit: usize,
    },
    /// The kernel does not support the element type of an argument.
    #[error("{kernel} does not support {dtype:?} as {what}")]
    Unsupported {
        /// Kernel that rejected the arguments.
        kernel: &'static str,
        /// Name of the kernel argument, for the error message.
        what: &'static str,
        /// Element type of the kernel argument.
        dtype: DType,
    },
    /// The configured instruction set is not available on this CPU.
    #[error("this CPU does not support {isa}")]
    MissingIsa {
        /// Name of the missing instruction set.
        isa: &'static str,
    },
    /// Error of a GPU, its runtime or its compiler.
    #[error(transparent)]
    Gpu(#[from] crate::gpu::GpuError),
    /// The device does not support graph capture.
    #[error("{device} does not support graph capture")]
    GraphsUnsupported {
        /// Description of the device without graph capture.
        device: String,
    },
    /// The device does not support vocab-parallel (sharded) sampling.
    #[error("{device} does not support vocab-parallel sampling")]
    VocabParallelUnsupported {
        /// Description of the device without vocab-parallel sampling.
        device: String,
    },
    /// The ranks that have the other shards of the vocabulary have failed.
    #[error("the ranks with the other vocabulary shards have failed")]
    PeerRanksFailed,
    /// A worker thread of the thread pool could not be started.
    #[error("cannot start worker thread {index}")]
    Thread {
        /// Index of the worker thread in the thread pool.
        index: usize,
    },
}
