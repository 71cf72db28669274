//! Symbol tables of the GPU runtimes, opened at run time: driver, run-time compiler, BLASLt.
//!
//! Most HIP functions have a CUDA twin that takes the same arguments in the same registers, so one table
//! with two names per entry serves both vendors. Nothing is needed to build: a machine without a
//! library gets an ordinary error that names what was tried. Opened libraries are never closed, because
//! GPU runtimes do not survive being unloaded while the process exits.
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

/// A handle, or an address on the device.
pub type DriverPtr = *mut c_void;

/// What every entry returns; 0 = success.
pub type DriverStatus = c_int;

/// Which of the two names of an entry a library exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuApi {
    /// AMD, and whatever else exports the HIP interface.
    Hip,
    /// NVIDIA.
    Cuda,
}

impl GpuApi {
    /// The one of two values that belongs to this interface.
    #[must_use]
    pub const fn pick<T: Copy>(self, hip: T, cuda: T) -> T {
        match self {
            Self::Hip => hip,
            Self::Cuda => cuda,
        }
    }
}
