//! Symbol tables of the GPU runtime libraries, which are opened at run time: driver, run-time compiler (RTC),
//! BLASLt.
//!
//! Most HIP functions have a CUDA counterpart with the same ABI (arguments in the same registers), so one
//! table with two symbol names per entry is used for both vendors. The build needs no GPU toolkit. If a
//! library is not installed, opening it returns an error that lists the paths that were tried. Opened
//! libraries are never closed, because GPU runtimes fail when they are unloaded during process exit.
//!
//! Handles and device addresses have the type [`DriverPtr`]; result codes have the type [`DriverStatus`]. In
//! argument lists, `x out` is a pointer to which the function writes `x`.

mod blaslt;
mod driver;
mod library;
mod rtc;
mod symbol_table;

pub use blaslt::{BlasDataType, BlasLtApi, BlasLtConstants, BlasLtStatus};
pub use driver::{
    DeviceAttribute, DriverApi, IpcHandle, LaunchAttribute, LaunchConfig, code, flag, link,
};
pub use library::{LibraryOpenError, LibrarySearchPaths, SharedLibrary};
pub use rtc::RtcApi;

use std::ffi::{c_int, c_void};

/// Handle of a driver object, or device address.
pub type DriverPtr = *mut c_void;

/// Result code of a driver function; 0 = success.
pub type DriverStatus = c_int;

/// GPU API that a library exports. It selects one of the two symbol names of each table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuApi {
    /// HIP API, exported by AMD's libraries and by the emulator.
    Hip,
    /// CUDA API, exported by NVIDIA's libraries.
    Cuda,
}

impl GpuApi {
    /// Returns the argument for this API: `hip` for the HIP API, `cuda` for the CUDA API.
    #[must_use]
    pub const fn pick<T: Copy>(self, hip: T, cuda: T) -> T {
        match self {
            Self::Hip => hip,
            Self::Cuda => cuda,
        }
    }
}
