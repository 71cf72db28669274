//! The 16-bit type of a device's weights, activations and pool: kernels are compiled for one.

use std::ffi::c_int;

use hip_runtime_sys::BlasDataType;

use super::device::GpuDevice;
use crate::{DType, DeviceError};

/// Which 16-bit type a GPU computes with, beside f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HalfDtype {
    /// The upper half of f32.
    #[default]
    BF16,
    /// IEEE binary16.
    F16,
}

impl HalfDtype {
    /// As the type of a matrix.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::BF16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// What the compiler is told (`csrc/dev/half.h`).
    pub const fn option(self) -> Option<&'static str> {
        match self {
            Self::BF16 => None,
            Self::F16 => Some("-DHALF_F16=1"),
        }
    }

    /// Its number in the copy engine's maps of matrices.
    pub const fn in_tensor_map(self) -> c_int {
        match self {
            Self::BF16 => 9,
            Self::F16 => 6,
        }
    }
}

impl GpuDevice {
    /// The 16-bit type that this device was opened for.
    #[must_use]
    pub const fn half_dtype(&self) -> DType {
        self.half_dtype.dtype()
    }

    /// The value of `ACT_F32` for activations of `dtype`; refuses every other type than f32 and the device's own.
    pub fn act_f32(&self, kernel: &'static str, dtype: DType) -> Result<u32, DeviceError> {
        match dtype {
            DType::F32 => Ok(1),
            dtype if dtype == self.half_dtype() => Ok(0),
            dtype => Err(DeviceError::Unsupported { kernel, what: "activation", dtype }),
        }
    }
}

/// A matrix's type as the matrix library calls it.
pub fn blas_data_type(kernel: &'static str, dtype: DType) -> Result<BlasDataType, DeviceError> {
    match dtype {
        DType::F32 => Ok(BlasDataType::F32),
        DType::BF16 => Ok(BlasDataType::BF16),
        DType::F16 => Ok(BlasDataType::F16),
        dtype => Err(DeviceError::Unsupported { kernel, what: "matrix", dtype }),
    }
}
