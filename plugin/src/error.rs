//! Errors of the interface for foreign hosts.

use collectives::CollectiveError;
use device::DeviceError;
use models::sharding::UnevenSplitError;
use models::{ForwardError, ModelConfigError, ModelLoadError};
use ops::{DType, OpError};

/// Error of a call of a foreign host.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The options are no JSON object with the fields of `hadron_open`.
    #[error("options: {0}")]
    Options(#[from] serde_json::Error),
    /// An option has a value outside of its range.
    #[error("options: {field} is {got}, expected {expected}")]
    Option {
        /// Name of the option.
        field: &'static str,
        /// Value of the option.
        got: u64,
        /// Values that are supported.
        expected: &'static str,
    },
    /// A pointer of a call is null.
    #[error("{argument} is null")]
    Null {
        /// Name of the argument.
        argument: &'static str,
    },
    /// A text of a call is not UTF-8.
    #[error("{argument} is not UTF-8")]
    NotUtf8 {
        /// Name of the argument.
        argument: &'static str,
    },
    /// An array of the host has fewer bytes than the step needs.
    #[error("{argument} has {got} bytes, the step needs {needed}")]
    TooSmall {
        /// Name of the array.
        argument: &'static str,
        /// Bytes of the array.
        got: u64,
        /// Bytes that the step accesses.
        needed: u64,
    },
    /// The address of an array is not a multiple of the alignment that kernels need.
    #[error("{argument} is at address {address:#x}, which is no multiple of {alignment}")]
    Misaligned {
        /// Name of the array.
        argument: &'static str,
        /// Address of the array.
        address: u64,
        /// Alignment in bytes.
        alignment: u64,
    },
    /// An array has an element type that the argument does not allow.
    #[error("{argument} has dtype {got}, expected {expected:?}")]
    ArrayDtype {
        /// Name of the array.
        argument: &'static str,
        /// Number of the dtype in the interface.
        got: u32,
        /// Dtypes that are allowed.
        expected: &'static [DType],
    },
    /// A number of a call is outside of its range.
    #[error("{argument} is {got}, at most {limit} is allowed")]
    AboveLimit {
        /// Name of the argument.
        argument: &'static str,
        /// Value of the argument.
        got: u64,
        /// Largest value that is allowed.
        limit: u64,
    },
    /// Two numbers of a call contradict each other.
    #[error("{argument} is {got}, expected {expected}")]
    Mismatch {
        /// Name of the argument.
        argument: &'static str,
        /// Value of the argument.
        got: u64,
        /// Value that agrees with the other arguments.
        expected: u64,
    },
    /// The model has a property that foreign hosts cannot serve.
    #[error("{architecture} has {what}, which is not supported under another server")]
    UnsupportedModel {
        /// Architecture of the model.
        architecture: &'static str,
        /// Property of the model.
        what: &'static str,
    },
    /// The KV cache type is not supported by the model.
    #[error("a KV cache in fp8 is not supported for MLA")]
    MlaKvDtype,
    /// No memory of the KV cache is bound.
    #[error("hadron_bind_kv was not called")]
    KvNotBound,
    /// Two calls with the same model overlap in time.
    #[error("another call with this model is running")]
    OverlappingCalls,
    /// An earlier call with this model failed.
    #[error("the model cannot be used after an earlier failure: {0}")]
    FailedBefore(String),
    /// The configuration of the model is invalid or not supported.
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    /// The checkpoint is invalid, or does not fit the device.
    #[error(transparent)]
    Load(#[from] ModelLoadError),
    /// Attention heads cannot be split over the ranks.
    #[error("k_proj: {0}")]
    Split(#[from] UnevenSplitError),
    /// The device cannot be opened, or an operation of the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A tensor operation rejected its arguments, or failed.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A forward pass failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// A collective operation failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

impl PluginError {
    /// Whether the call was rejected before anything was launched, so that the model can still be used.
    #[must_use]
    pub fn is_rejection(&self) -> bool {
        match self {
            Self::Device(error)
            | Self::Op(OpError::Device(error))
            | Self::Forward(ForwardError::Op(OpError::Device(error))) => is_rejected(error),
            Self::Forward(ForwardError::Collective(_))
            | Self::Collective(_)
            | Self::FailedBefore(_) => false,
            _ => true,
        }
    }
}

/// Whether a device rejected the arguments of a launch. All other errors are failures of the device.
fn is_rejected(error: &DeviceError) -> bool {
    use device::gpu::GpuError::{CaptureInvalidated, Capturing};
    matches!(
        error,
        DeviceError::Shape { .. }
            | DeviceError::Unsupported { .. }
            | DeviceError::Index { .. }
            | DeviceError::Gpu(Capturing { .. } | CaptureInvalidated)
    )
}
