//! Symbol tables of the GPU runtimes, opened at run time: driver, run-time compiler (RTC), BLASLt.
//!
//! Most HIP functions have a CUDA counterpart with the same ABI (arguments in the same registers), so one
//! table with two symbol names per entry serves both vendors. Building needs no GPU toolkit: on a machine
//! without the library, opening returns an error that lists the paths tried. Opened libraries are never
//! closed, because GPU runtimes fail when they are unloaded during process exit.
//!
//! Handles and device addresses are [`DriverPtr`]; result codes are [`DriverStatus`], 0 = success.

mod blaslt;
mod driver;
mod library;
mod rtc;
mod symbol_table;

pub use blaslt::{BlasDataType, BlasLtApi, BlasLtConstants, BlasLtStatus};
pub use driver::{
    DeviceAttribute, DriverApi, IpcHandle, LaunchAttribute, LaunchConfig, code, flag,
};
pub use library::{LibraryOpenError, LibrarySearch, SharedLibrary};
pub use rtc::RtcApi;

use std::ffi::{c_int, c_void};

/// Handle of the driver, or device address.
pub type DriverPtr = *mut c_void;

/// Result code of a driver call; 0 = success.
pub type DriverStatus = c_int;

/// GPU API that a library exports: selects one of the two symbol names of each table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuApi {
    /// HIP: AMD, and other libraries that export the HIP API.
    Hip,
    /// CUDA: NVIDIA.
    Cuda,
}

impl GpuApi {
    /// Returns `hip` or `cuda`, depending on the API.
    #[must_use]
    pub const fn pick<T: Copy>(self, hip: T, cuda: T) -> T {
        match self {
            Self::Hip => hip,
            Self::Cuda => cuda,
        }
    }
}
