//! 16-bit type of the weights, activations and KV cache of a device, for which kernels are compiled.

use std::ffi::c_int;

use hip_runtime_sys::BlasDataType;

use super::device::GpuDevice;
use crate::{DType, DeviceError};

/// 16-bit floating-point type that a GPU computes with, in addition to f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HalfDtype {
    /// bfloat16.
    #[default]
    BF16,
    /// IEEE binary16.
    F16,
}

impl HalfDtype {
    /// Returns the element type.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::BF16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// Returns the compiler option that selects the type (`csrc/dev/half.h`), if any.
    pub const fn option(self) -> Option<&'static str> {
        match self {
            Self::BF16 => None,
            Self::F16 => Some("-DHALF_F16=1"),
        }
    }

    /// Returns the data type number in TMA descriptors (`CUtensorMapDataType`).
    pub const fn in_tensor_map(self) -> c_int {
        match self {
            Self::BF16 => 9,
            Self::F16 => 6,
        }
    }
}

impl GpuDevice {
    /// Returns the 16-bit type that this device was opened for.
    #[must_use]
    pub const fn half_dtype(&self) -> DType {
        self.half_dtype.dtype()
    }

    /// Returns the value of the define `ACT_F32` for activations of `dtype`.
    ///
    /// Errors: `dtype` is neither f32 nor the 16-bit type of the device.
    pub fn act_f32(&self, kernel: &'static str, dtype: DType) -> Result<u32, DeviceError> {
        match dtype {
            DType::F32 => Ok(1),
            dtype if dtype == self.half_dtype() => Ok(0),
            dtype => Err(DeviceError::Unsupported { kernel, what: "activation", dtype }),
        }
    }
}

/// Converts an element type to the BLASLt data type.
///
/// Errors: `dtype` is not f32, bf16 or f16.
pub fn blas_data_type(kernel: &'static str, dtype: DType) -> Result<BlasDataType, DeviceError> {
    match dtype {
        DType::F32 => Ok(BlasDataType::F32),
        DType::BF16 => Ok(BlasDataType::BF16),
        DType::F16 => Ok(BlasDataType::F16),
        dtype => Err(DeviceError::Unsupported { kernel, what: "matrix", dtype }),
    }
}
