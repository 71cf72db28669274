//! Symbol table of the collective library: AMD's RCCL, or NVIDIA's NCCL, which exports the same names with
//! the same arguments. The library is opened at run time; the build needs neither headers nor libraries.
//!
//! Handles and device addresses are [`DriverPtr`]; result codes are [`NcclResult`], see [`status`].

use hip_runtime_sys::{DriverPtr, LibraryOpenError, LibrarySearch, SharedLibrary};
use std::ffi::{c_char, c_int};
use std::path::PathBuf;

/// Result code of a library call.
pub type NcclResult = c_int;

/// Result codes that callers distinguish.
pub mod status {
    use crate::NcclResult;

    /// Success.
    pub const SUCCESS: NcclResult = 0;
    /// Another rank, or the connection to it, has failed.
    pub const REMOTE_ERROR: NcclResult = 6;
    /// A non-blocking communicator has not completed the operation; poll again.
    pub const IN_PROGRESS: NcclResult = 7;
}

/// Element types; RCCL and NCCL use the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum NcclDataType {
    /// 32-bit integer.
    I32 = 2,
    /// 64-bit integer.
    I64 = 4,
    /// IEEE binary16.
    F16 = 6,
    /// IEEE binary32.
    F32 = 7,
    /// The upper half of binary32.
    BF16 = 9,
}

/// Sum reduction.
pub const REDUCE_SUM: c_int = 0;

/// Unique id of a communicator: created by one rank, distributed to all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct NcclUniqueId(pub [u8; 128]);

/// Configuration of a communicator: the first fields of `ncclConfig_t`. `size` is their size in bytes; all
/// later fields have the library's defaults.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl NcclConfig {
    /// Returns a configuration for calls that return before they complete; poll `comm_get_async_error`.
    #[must_use]
    pub const fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: VERSION_MIN as u32,
            blocking: 0,
        }
    }
}

/// Version 2.14.0, the first with non-blocking communicators.
pub const VERSION_MIN: c_int = 21_400;

macro_rules! table {
    ($( $(#[$doc:meta])* $field:ident: $name:literal ($($arg:ty),* $(,)?) -> $ret:ty; )*) => {
        /// Functions of the collective library.
        #[derive(Debug)]
        pub struct RcclLibrary {
            /// Path under which the library was found.
            pub library: PathBuf,
            $( $(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret, )*
        }

        impl RcclLibrary {
            /// Opens the first library of `search` that can be opened; it is never closed.
            ///
            /// Errors: no library can be opened, or it lacks a function; the message names the paths tried.
            pub fn open(search: &LibrarySearch) -> Result<Self, LibraryOpenError> {
                let opened = SharedLibrary::open(search)?;
                // SAFETY: the signatures match the vendors' headers in the calling convention; each was
                // compared.
                unsafe {
                    Ok(Self {
                        $( $field: opened.symbol($name)?, )*
                        library: opened.path().to_owned(),
                    })
                }
            }
        }
    };
}

table! {
    /// `(version out)`: 10,000 · major + 100 · minor + patch.
    get_version: "ncclGetVersion" (*mut c_int) -> NcclResult;
    /// `(status)`: static text.
    get_error_string: "ncclGetErrorString" (NcclResult) -> *const c_char;
    /// `(communicator or null)`: text of the last error, valid until the next error.
    get_last_error: "ncclGetLastError" (DriverPtr) -> *const c_char;
    /// `(id out)`.
    get_unique_id: "ncclGetUniqueId" (*mut NcclUniqueId) -> NcclResult;
    /// `(communicator out, ranks, id, rank, config)`: for the current device.
    comm_init_rank_config: "ncclCommInitRankConfig" (
        *mut DriverPtr, c_int, NcclUniqueId, c_int, *const NcclConfig,
    ) -> NcclResult;
    /// `(communicator, status out)`.
    comm_get_async_error: "ncclCommGetAsyncError" (DriverPtr, *mut NcclResult) -> NcclResult;
    /// `(communicator)`: aborts operations in flight without waiting for other ranks, and frees the
    /// communicator.
    comm_abort: "ncclCommAbort" (DriverPtr) -> NcclResult;
    /// `(communicator)`: waits for operations in flight, together with all ranks.
    comm_finalize: "ncclCommFinalize" (DriverPtr) -> NcclResult;
    /// `(communicator)`: frees the communicator.
    comm_destroy: "ncclCommDestroy" (DriverPtr) -> NcclResult;
    /// `(from, to, elements, type, reduction, communicator, stream)`.
    all_reduce: "ncclAllReduce" (DriverPtr, DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// `(from, to, elements of each rank, type, communicator, stream)`.
    all_gather: "ncclAllGather" (DriverPtr, DriverPtr, usize, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// `(from, to, elements of each rank, type, reduction, communicator, stream)`.
    reduce_scatter: "ncclReduceScatter" (DriverPtr, DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// `(from, to, elements, type, root, communicator, stream)`.
    broadcast: "ncclBroadcast" (DriverPtr, DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// `(from, elements, type, to rank, communicator, stream)`.
    send: "ncclSend" (DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// `(to, elements, type, from rank, communicator, stream)`.
    recv: "ncclRecv" (DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// `()`: starts a group call; later calls of this thread are launched together.
    group_start: "ncclGroupStart" () -> NcclResult;
    /// `()`: ends the group call and launches its calls.
    group_end: "ncclGroupEnd" () -> NcclResult;
}

#[cfg(test)]
mod tests {
    use super::*;
    use hip_runtime_sys::GpuApi;
    use std::path::Path;

    #[test]
    fn missing_library_error_names_the_paths_tried() {
        let search = LibrarySearch::named("NCCL", Path::new("/nowhere/libnccl.so.2"));
        let error = RcclLibrary::open(&search).expect_err("there is no such file").to_string();
        assert!(error.starts_with("no NCCL found; tried /nowhere/libnccl.so.2: "), "{error}");
    }

    #[test]
    fn library_without_symbols_is_rejected_by_name() {
        let error = RcclLibrary::open(&LibrarySearch::named("RCCL", Path::new("libc.so.6")));
        let error = error.expect_err("the C library has no collectives").to_string();
        assert_eq!(error, "libc.so.6 has no ncclGetVersion");
    }

    #[test]
    fn nccl_config_has_the_header_layout() {
        assert_eq!((size_of::<NcclConfig>(), std::mem::offset_of!(NcclConfig, blocking)), (24, 16));
        assert_eq!(size_of::<NcclUniqueId>(), 128);
    }

    /// Skips libraries that are not installed; needs no GPU.
    #[test]
    fn installed_library_reports_version_and_unique_ids() {
        for api in [GpuApi::Hip, GpuApi::Cuda] {
            let Ok(rccl) = RcclLibrary::open(&LibrarySearch::collectives(api, &[])) else {
                continue;
            };
            let (mut version, mut id) = (0, NcclUniqueId([0; 128]));
            // SAFETY: `version` is valid for writes.
            assert_eq!(unsafe { (rccl.get_version)(&raw mut version) }, status::SUCCESS);
            assert!(version >= VERSION_MIN, "{version}");
            // SAFETY: `id` is valid for writes.
            assert_eq!(unsafe { (rccl.get_unique_id)(&raw mut id) }, status::SUCCESS);
            assert_ne!(id, NcclUniqueId([0; 128]));
        }
    }
}
