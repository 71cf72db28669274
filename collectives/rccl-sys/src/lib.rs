//! The symbol table of the library in which the ranks of several GPUs combine what they have: AMD's RCCL, which
//! exports the names of NVIDIA's NCCL with the same arguments. SharedLibrary at run time; nothing is needed to build.
//!
//! Handles and device addresses are [`DriverPtr`]; result codes are [`NcclResult`], see [`status`].

use hip_runtime_sys::{DriverPtr, LibraryOpenError, LibrarySearch, SharedLibrary};
use std::ffi::{c_char, c_int};
use std::path::PathBuf;

/// What a call returns.
pub type NcclResult = c_int;

/// Results that mean something to a caller.
pub mod status {
    use crate::NcclResult;

    /// Done.
    pub const SUCCESS: NcclResult = 0;
    /// Another rank, or the way to it, has failed.
    pub const REMOTE_ERROR: NcclResult = 6;
    /// A communicator that does not block has not finished: ask it again.
    pub const IN_PROGRESS: NcclResult = 7;
}

/// Element types, numbered equally by both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum NcclDataType {
    /// 32 bits.
    I32 = 2,
    /// 64 bits.
    I64 = 4,
    /// IEEE binary16.
    F16 = 6,
    /// IEEE binary32.
    F32 = 7,
    /// The upper half of binary32.
    BF16 = 9,
}

/// The reduction that adds.
pub const REDUCE_SUM: c_int = 0;

/// By what the ranks of a communicator find each other: made by one of them, told to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct NcclUniqueId(pub [u8; 128]);

/// How a communicator is made: the first fields of `ncclConfig_t`, which says itself how many there are. All others
/// have the library's defaults.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl NcclConfig {
    /// Calls return before they are done; `comm_get_async_error` says when.
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

/// 2.14.0, the first version with communicators that do not block.
pub const VERSION_MIN: c_int = 21_400;

macro_rules! table {
    ($( $(#[$doc:meta])* $field:ident: $name:literal ($($arg:ty),* $(,)?) -> $ret:ty; )*) => {
        /// The functions.
        #[derive(Debug)]
        pub struct RcclLibrary {
            /// The name under which the library was found.
            pub library: PathBuf,
            $( $(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret, )*
        }

        impl RcclLibrary {
            /// Opens the first library of `search` that can be opened; it stays open for good.
            ///
            /// Errors: there is none, or it lacks a function; the message names what was tried.
            pub fn open(search: &LibrarySearch) -> Result<Self, LibraryOpenError> {
                let opened = SharedLibrary::open(search)?;
                // SAFETY: the types are those of the vendors' headers at register level, compared entry by entry.
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
    /// `(status)`: a static text.
    get_error_string: "ncclGetErrorString" (NcclResult) -> *const c_char;
    /// `(communicator or null)`: the last error in words, until the next one.
    get_last_error: "ncclGetLastError" (DriverPtr) -> *const c_char;
    /// `(id out)`.
    get_unique_id: "ncclGetUniqueId" (*mut NcclUniqueId) -> NcclResult;
    /// `(communicator out, ranks, id, rank, config)`: of the device that is current.
    comm_init_rank_config: "ncclCommInitRankConfig" (
        *mut DriverPtr, c_int, NcclUniqueId, c_int, *const NcclConfig,
    ) -> NcclResult;
    /// `(communicator, status out)`.
    comm_get_async_error: "ncclCommGetAsyncError" (DriverPtr, *mut NcclResult) -> NcclResult;
    /// `(communicator)`: ends what is under way, waits for nobody, and frees it.
    comm_abort: "ncclCommAbort" (DriverPtr) -> NcclResult;
    /// `(communicator)`: waits for what is under way, with all ranks.
    comm_finalize: "ncclCommFinalize" (DriverPtr) -> NcclResult;
    /// `(communicator)`: frees it.
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
    /// `()`: calls of this thread from now on begin together.
    group_start: "ncclGroupStart" () -> NcclResult;
    /// `()`: they begin.
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

    /// Where a library is installed, which needs no GPU to be asked this.
    #[test]
    fn installed_library_reports_version_and_unique_ids() {
        for api in [GpuApi::Hip, GpuApi::Cuda] {
            let Ok(rccl) = RcclLibrary::open(&LibrarySearch::collectives(api, &[])) else {
                continue;
            };
            let (mut version, mut id) = (0, NcclUniqueId([0; 128]));
            // SAFETY: a place to write to.
            assert_eq!(unsafe { (rccl.get_version)(&raw mut version) }, status::SUCCESS);
            assert!(version >= VERSION_MIN, "{version}");
            // SAFETY: a place to write to.
            assert_eq!(unsafe { (rccl.get_unique_id)(&raw mut id) }, status::SUCCESS);
            assert_ne!(id, NcclUniqueId([0; 128]));
        }
    }
}
