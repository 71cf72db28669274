//! Function table of the collective library: RCCL (AMD) or NCCL (NVIDIA), which export functions with the
//! same names and arguments. The library is opened at run time; the build needs neither its headers nor the
//! library.
//!
//! Handles and device addresses have the type [`DriverPtr`]; result codes have the type [`NcclResult`] (see
//! [`status`]). In argument lists, `x out` is a pointer to which the function writes `x`.

use hip_runtime_sys::{DriverPtr, LibraryOpenError, LibrarySearchPaths, SharedLibrary};
use std::ffi::{c_char, c_int};
use std::path::PathBuf;

/// Result code of a function of the collective library (`ncclResult_t`).
pub type NcclResult = c_int;

/// Result codes that callers handle individually.
pub mod status {
    use crate::NcclResult;

    /// The function has succeeded.
    pub const SUCCESS: NcclResult = 0;
    /// Another rank, or the connection to another rank, has failed.
    pub const REMOTE_ERROR: NcclResult = 6;
    /// The non-blocking communicator has not completed the operation yet; the caller must poll again.
    pub const IN_PROGRESS: NcclResult = 7;
}

/// Element type of a collective operation (`ncclDataType_t`); RCCL and NCCL use the same values.
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
    /// bfloat16: the upper 16 bits of binary32.
    BF16 = 9,
}

/// Reduction operation `ncclSum`.
pub const REDUCE_SUM: c_int = 0;

/// Unique id of a communicator (`ncclUniqueId`). One rank creates it and sends it to all other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct NcclUniqueId(pub [u8; 128]);

/// Configuration of a communicator: the first fields of `ncclConfig_t`. The field `size` is the size of these
/// fields in bytes, so that the library uses its defaults for all other fields.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl NcclConfig {
    /// Returns a configuration of a non-blocking communicator, whose library calls return before they
    /// complete. Callers poll for completion with `comm_get_async_error`.
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

/// Oldest supported version, 2.14.0, which is the first version with non-blocking communicators.
pub const VERSION_MIN: c_int = 21_400;

macro_rules! table {
    ($( $(#[$doc:meta])* $field:ident: $name:literal ($($arg:ty),* $(,)?) -> $ret:ty; )*) => {
        /// Function table of RCCL or NCCL.
        #[derive(Debug)]
        pub struct RcclLibrary {
            /// Path or name with which the library was opened.
            pub library: PathBuf,
            $( $(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret, )*
        }

        impl RcclLibrary {
            /// Opens the first library of `search` that can be opened. The library is never closed.
            ///
            /// Errors: no library can be opened, or the library lacks a function. The message lists the paths
            /// that were tried.
            pub fn open(search: &LibrarySearchPaths) -> Result<Self, LibraryOpenError> {
                let opened = SharedLibrary::open(search)?;
                // SAFETY: each signature was compared with the vendors' headers and matches in the calling
                // convention.
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
    /// Arguments `(version out)`. The version is 10,000 · major + 100 · minor + patch.
    get_version: "ncclGetVersion" (*mut c_int) -> NcclResult;
    /// Arguments `(status)`. Returns the error text of a status code, which is static.
    get_error_string: "ncclGetErrorString" (NcclResult) -> *const c_char;
    /// Arguments `(communicator or null)`. Returns the message of the last error of the library, which is
    /// valid until the next error.
    get_last_error: "ncclGetLastError" (DriverPtr) -> *const c_char;
    /// Arguments `(id out)`. Creates a unique id for a communicator.
    get_unique_id: "ncclGetUniqueId" (*mut NcclUniqueId) -> NcclResult;
    /// Arguments `(communicator out, ranks, id, rank, config)`. Creates a communicator for the current
    /// device.
    comm_init_rank_config: "ncclCommInitRankConfig" (
        *mut DriverPtr, c_int, NcclUniqueId, c_int, *const NcclConfig,
    ) -> NcclResult;
    /// Arguments `(communicator, status out)`. Returns the status of non-blocking operations.
    comm_get_async_error: "ncclCommGetAsyncError" (DriverPtr, *mut NcclResult) -> NcclResult;
    /// Arguments `(communicator)`. Aborts operations in flight without waiting for other ranks, and frees the
    /// communicator.
    comm_abort: "ncclCommAbort" (DriverPtr) -> NcclResult;
    /// Arguments `(communicator)`. Waits for operations in flight. All ranks must call this function
    /// together.
    comm_finalize: "ncclCommFinalize" (DriverPtr) -> NcclResult;
    /// Arguments `(communicator)`. Frees the communicator.
    comm_destroy: "ncclCommDestroy" (DriverPtr) -> NcclResult;
    /// Arguments `(from, to, elements, type, reduction, communicator, stream)`. Every rank receives the
    /// reduced elements.
    all_reduce: "ncclAllReduce" (DriverPtr, DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// Arguments `(from, to, elements of each rank, type, communicator, stream)`. Every rank receives the
    /// elements of all ranks.
    all_gather: "ncclAllGather" (DriverPtr, DriverPtr, usize, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// Arguments `(from, to, elements of each rank, type, reduction, communicator, stream)`. Every rank
    /// receives its part of the reduced elements.
    reduce_scatter: "ncclReduceScatter" (DriverPtr, DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// Arguments `(from, to, elements, type, root, communicator, stream)`. Every rank receives the elements
    /// of `root`.
    broadcast: "ncclBroadcast" (DriverPtr, DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// Arguments `(from, elements, type, destination rank, communicator, stream)`. Sends elements to one
    /// rank.
    send: "ncclSend" (DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// Arguments `(to, elements, type, source rank, communicator, stream)`. Receives elements from one rank.
    recv: "ncclRecv" (DriverPtr, usize, c_int, c_int, DriverPtr, DriverPtr) -> NcclResult;
    /// No arguments. Starts a group call: the library launches the following calls of this thread together.
    group_start: "ncclGroupStart" () -> NcclResult;
    /// No arguments. Ends the group call and launches its calls.
    group_end: "ncclGroupEnd" () -> NcclResult;
}

#[cfg(test)]
mod tests {
    use super::*;
    use hip_runtime_sys::GpuApi;
    use std::path::Path;

    #[test]
    fn missing_library_error_names_the_paths_tried() {
        let search = LibrarySearchPaths::named("NCCL", Path::new("/nowhere/libnccl.so.2"));
        let error = RcclLibrary::open(&search).expect_err("there is no such file").to_string();
        assert!(error.starts_with("no NCCL found; tried /nowhere/libnccl.so.2: "), "{error}");
    }

    #[test]
    fn library_without_symbols_is_rejected_by_name() {
        let error = RcclLibrary::open(&LibrarySearchPaths::named("RCCL", Path::new("libc.so.6")));
        let error = error.expect_err("the C library has no collectives").to_string();
        assert_eq!(error, "libc.so.6 has no symbol ncclGetVersion");
    }

    #[test]
    fn nccl_config_has_the_header_layout() {
        assert_eq!((size_of::<NcclConfig>(), std::mem::offset_of!(NcclConfig, blocking)), (24, 16));
        assert_eq!(size_of::<NcclUniqueId>(), 128);
    }

    /// Checks the collective libraries that are installed on this machine; no GPU is needed.
    #[test]
    fn installed_library_reports_version_and_unique_ids() {
        for api in [GpuApi::Hip, GpuApi::Cuda] {
            let Ok(rccl) = RcclLibrary::open(&LibrarySearchPaths::collectives(api, &[])) else {
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
