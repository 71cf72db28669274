//! What can go wrong on a device.

use crate::DType;

/// A device refused or failed. `Shape` and `Unsupported` are the caller's mistakes, found before any
/// memory is touched; the others mean that the device is of no further use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device has no such amount of memory.
    #[error("out of memory: {bytes} bytes on {device}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Device, in words.
        device: &'static str,
    },
    /// Sizes of the arguments contradict each other.
    #[error("{kernel}: {what} is {got}, expected {expected}")]
    Shape {
        /// The kernel that refused.
        kernel: &'static str,
        /// The size in question.
        what: &'static str,
        /// Its value.
        got: usize,
        /// The value that would fit.
        expected: usize,
    },
    /// An index points outside its table or pool.
    #[error("{kernel}: {what} {index} is outside [0, {limit})")]
    Index {
        /// The kernel that refused.
        kernel: &'static str,
        /// What was indexed.
        what: &'static str,
        /// The index.
        index: i64,
        /// One past the largest valid index.
        limit: usize,
    },
    /// The kernel exists, but not for this element type.
    #[error("{kernel} does not take {dtype:?} as {what}")]
    Unsupported {
        /// The kernel that refused.
        kernel: &'static str,
        /// The argument.
        what: &'static str,
        /// Its type.
        dtype: DType,
    },
    /// The configured instruction set is not available on this processor.
    #[error("this processor has no {isa}")]
    MissingIsa {
        /// Name of the instruction set.
        isa: &'static str,
    },
    /// A GPU refused or failed.
    #[error(transparent)]
    Gpu(#[from] crate::gpu::GpuError),
    /// This device runs every launch at once.
    #[error("{device} cannot capture launches")]
    GraphsUnsupported {
        /// Device, in words.
        device: String,
    },
    /// This device cannot choose tokens out of a part of the vocabulary.
    #[error("{device} needs the logits of the whole vocabulary")]
    VocabParallelUnsupported {
        /// Device, in words.
        device: String,
    },
    /// The ranks that have the other parts of the vocabulary are gone.
    #[error("the ranks that share the vocabulary are gone")]
    PeerRanksFailed,
    /// A worker thread could not be started.
    #[error("cannot start worker thread {index}")]
    Thread {
        /// Index of the thread.
        index: usize,
    },
}
