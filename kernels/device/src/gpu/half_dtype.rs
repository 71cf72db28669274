//! 16-bit data type of the weights, activations and KV cache of a device. Kernels are compiled for this data
//! type.

use std::ffi::c_int;

use hip_runtime_sys::BlasDataType;

use super::device::GpuDevice;
use crate::{DType, DeviceError};

/// 16-bit floating-point type that a GPU uses for the computation, in addition to f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HalfDtype {
    /// bfloat16.
    #[default]
    BF16,
    /// IEEE binary16.
    F16,
}

impl HalfDtype {
    /// Returns the element type that corresponds to this 16-bit type.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::BF16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// Returns the compiler option that selects this type in `csrc/dev/half.h`; `None` for the default type.
    pub const fn option(self) -> Option<&'static str> {
        match self {
            Self::BF16 => None,
            Self::F16 => Some("-DHALF_F16=1"),
        }
    }

    /// Returns the `CUtensorMapDataType` value of this data type, for TMA descriptors.
    pub const fn in_tensor_map(self) -> c_int {
        match self {
            Self::BF16 => 9,
            Self::F16 => 6,
        }
    }
}

impl GpuDevice {
    /// Returns the 16-bit data type for which this device was opened.
    #[must_use]
    pub const fn half_dtype(&self) -> DType {
        self.half_dtype.dtype()
    }

    /// Returns the value of the preprocessor define `ACT_F32` for activations of `dtype`: 1 for f32,
    /// otherwise 0.
    ///
    /// Errors: `dtype` is neither f32 nor the 16-bit data type of the device.
    pub fn act_f32(&self, kernel: &'static str, dtype: DType) -> Result<u32, DeviceError> {
        match dtype {
            DType::F32 => Ok(1),
            dtype if dtype == self.half_dtype() => Ok(0),
            dtype => Err(DeviceError::Unsupported { kernel, what: "activation", dtype }),
        }
    }
}

/// Returns the BLASLt data type of an element type.
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
