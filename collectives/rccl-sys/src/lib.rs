//! The symbol table of the library in which the ranks of several GPUs combine what they have: AMD's RCCL, which
//! exports the names of NVIDIA's NCCL with the same arguments. Opened at run time; nothing is needed to build.
//!
//! Handles and device addresses are [`Ptr`]; result codes are [`Status`], see [`status`].

use hip_runtime_sys::{OpenError, Opened, Ptr, Search};
use std::ffi::{c_char, c_int};
use std::path::PathBuf;

/// What a call returns.
pub type Status = c_int;

/// Results that mean something to a caller.
pub mod status {
    use crate::Status;

    /// Done.
    pub const SUCCESS: Status = 0;
    /// Another rank, or the way to it, has failed.
    pub const REMOTE_ERROR: Status = 6;
    /// A communicator that does not block has not finished: ask it again.
    pub const IN_PROGRESS: Status = 7;
}

/// Element types, numbered equally by both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum DataType {
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
pub const SUM: c_int = 0;

/// By what the ranks of a communicator find each other: made by one of them, told to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// How a communicator is made: the first fields of `ncclConfig_t`, which says itself how many there are. All others
/// have the library's defaults.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// Calls return before they are done; `comm_get_async_error` says when.
    #[must_use]
    pub const fn non_blocking() -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: OLDEST as u32, blocking: 0 }
    }
}

/// 2.14.0, the first version with communicators that do not block.
pub const OLDEST: c_int = 21_400;

macro_rules! table {
    ($( $(#[$doc:meta])* $field:ident: $name:literal ($($arg:ty),* $(,)?) -> $ret:ty; )*) => {
        /// The functions.
        #[derive(Debug)]
        pub struct Rccl {
            /// The name under which the library was found.
            pub library: PathBuf,
            $( $(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret, )*
        }

        impl Rccl {
            /// Opens the first library of `search` that can be opened; it stays open for good.
            ///
            /// Errors: there is none, or it lacks a function; the message names what was tried.
            pub fn open(search: &Search) -> Result<Self, OpenError> {
                let opened = Opened::open(search)?;
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
    get_version: "ncclGetVersion" (*mut c_int) -> Status;
    /// `(status)`: a static text.
    get_error_string: "ncclGetErrorString" (Status) -> *const c_char;
    /// `(communicator or null)`: the last error in words, until the next one.
    get_last_error: "ncclGetLastError" (Ptr) -> *const c_char;
    /// `(id out)`.
    get_unique_id: "ncclGetUniqueId" (*mut UniqueId) -> Status;
    /// `(communicator out, ranks, id, rank, config)`: of the device that is current.
    comm_init_rank_config: "ncclCommInitRankConfig" (
        *mut Ptr, c_int, UniqueId, c_int, *const Config,
    ) -> Status;
    /// `(communicator, status out)`.
    comm_get_async_error: "ncclCommGetAsyncError" (Ptr, *mut Status) -> Status;
    /// `(communicator)`: ends what is under way, waits for nobody, and frees it.
    comm_abort: "ncclCommAbort" (Ptr) -> Status;
    /// `(communicator)`: waits for what is under way, with all ranks.
    comm_finalize: "ncclCommFinalize" (Ptr) -> Status;
    /// `(communicator)`: frees it.
    comm_destroy: "ncclCommDestroy" (Ptr) -> Status;
    /// `(from, to, elements, type, reduction, communicator, stream)`.
    all_reduce: "ncclAllReduce" (Ptr, Ptr, usize, c_int, c_int, Ptr, Ptr) -> Status;
    /// `(from, to, elements of each rank, type, communicator, stream)`.
    all_gather: "ncclAllGather" (Ptr, Ptr, usize, c_int, Ptr, Ptr) -> Status;
    /// `(from, to, elements of each rank, type, reduction, communicator, stream)`.
    reduce_scatter: "ncclReduceScatter" (Ptr, Ptr, usize, c_int, c_int, Ptr, Ptr) -> Status;
    /// `(from, to, elements, type, root, communicator, stream)`.
    broadcast: "ncclBroadcast" (Ptr, Ptr, usize, c_int, c_int, Ptr, Ptr) -> Status;
    /// `(from, elements, type, to rank, communicator, stream)`.
    send: "ncclSend" (Ptr, usize, c_int, c_int, Ptr, Ptr) -> Status;
    /// `(to, elements, type, from rank, communicator, stream)`.
    recv: "ncclRecv" (Ptr, usize, c_int, c_int, Ptr, Ptr) -> Status;
    /// `()`: calls of this thread from now on begin together.
    group_start: "ncclGroupStart" () -> Status;
    /// `()`: they begin.
    group_end: "ncclGroupEnd" () -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;
    use hip_runtime_sys::Api;
    use std::path::Path;

    #[test]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let search = Search::named("NCCL", Path::new("/nowhere/libnccl.so.2"));
        let error = Rccl::open(&search).expect_err("there is no such file").to_string();
        assert!(error.starts_with("no NCCL found; tried /nowhere/libnccl.so.2: "), "{error}");
    }

    #[test]
    fn another_library_is_refused_by_the_symbol_it_lacks() {
        let error = Rccl::open(&Search::named("RCCL", Path::new("libc.so.6")));
        let error = error.expect_err("the C library has no collectives").to_string();
        assert_eq!(error, "libc.so.6 has no ncclGetVersion");
    }

    #[test]
    fn the_config_has_the_layout_of_the_header() {
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, blocking)), (24, 16));
        assert_eq!(size_of::<UniqueId>(), 128);
    }

    /// Where a library is installed, which needs no GPU to be asked this.
    #[test]
    fn an_installed_library_gives_its_version_and_ids() {
        for api in [Api::Hip, Api::Cuda] {
            let Ok(rccl) = Rccl::open(&Search::collectives(api, &[])) else { continue };
            let (mut version, mut id) = (0, UniqueId([0; 128]));
            // SAFETY: a place to write to.
            assert_eq!(unsafe { (rccl.get_version)(&raw mut version) }, status::SUCCESS);
            assert!(version >= OLDEST, "{version}");
            // SAFETY: a place to write to.
            assert_eq!(unsafe { (rccl.get_unique_id)(&raw mut id) }, status::SUCCESS);
            assert_ne!(id, UniqueId([0; 128]));
        }
    }
}
