//! Tensor-parallel ranks that are processes of a foreign host.

use std::ffi::c_void;
use std::path::PathBuf;

use collectives::{DeviceGroup, ParallelGroup, SharedMemoryRendezvous};
use kernels::KernelBackend;
use models::sharding::{ParallelRank, ParallelRanks};

use crate::PluginError;

/// Bytes in which a rank sends the path of shared memory to the others.
const PATH_BYTES: usize = 64;

/// Communication of the host's ranks, as `hadron_ranks` in `include/hadron.h`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ForeignRanks {
    /// First argument of `all_gather`.
    pub context: *mut c_void,
    /// Gathers bytes of each rank in rank order; returns 0 on success.
    pub all_gather: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            own: *const c_void,
            bytes: u64,
            all: *mut c_void,
        ) -> i32,
    >,
    /// Index of this rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
}

/// Tensor-parallel group of a model. The first rank keeps the shared memory through which the group was formed.
pub(crate) struct RankGroup {
    pub(crate) group: ParallelGroup,
    pub(crate) ranks: ParallelRanks,
    _rendezvous: Option<SharedMemoryRendezvous>,
}

impl RankGroup {
    /// Returns the group of one rank.
    pub(crate) fn single() -> Self {
        let ranks = ParallelRanks { tp: ParallelRank::SINGLE, ep: ParallelRank::SINGLE };
        Self { group: ParallelGroup::single(), ranks, _rendezvous: None }
    }

    /// Forms the group of the host's ranks: the first rank creates shared memory, and the others open it at the path that they
    /// receive from the host.
    ///
    /// Errors: a rank is not below the number of ranks, the communication of the host fails, or the devices cannot connect.
    ///
    /// # Safety
    /// `all_gather` and its context are as `include/hadron.h` describes.
    pub(crate) unsafe fn join(
        host: &ForeignRanks,
        backend: &KernelBackend,
    ) -> Result<Self, PluginError> {
        let (rank, size) = (host.rank as usize, host.size as usize);
        if rank >= size {
            let (argument, limit) = ("rank", u64::from(host.size).saturating_sub(1));
            return Err(PluginError::AboveLimit { argument, got: u64::from(host.rank), limit });
        }
        if size == 1 {
            return Ok(Self::single());
        }
        let created = (rank == 0).then(|| SharedMemoryRendezvous::create(&[size])).transpose()?;
        let own_path = created.as_ref().map(|memory| memory.path().to_owned()).unwrap_or_default();
        // SAFETY: the caller guarantees the function.
        let path = unsafe { path_of_first_rank(host, &own_path)? };
        let rendezvous = match created {
            Some(memory) => memory,
            None => SharedMemoryRendezvous::open(&path, &[size])?,
        };
        let shared = rendezvous.join(0, rank)?;
        let group = ParallelGroup::new(match backend.gpu() {
            Some(gpu) => Box::new(DeviceGroup::join(shared, gpu)?),
            None => Box::new(shared),
        });
        let ranks = ParallelRanks { tp: ParallelRank { rank, size }, ep: ParallelRank::SINGLE };
        Ok(Self { group, ranks, _rendezvous: Some(rendezvous) })
    }
}

/// Sends `own` to all ranks, and returns the path of the first rank.
///
/// # Safety
/// As for [`RankGroup::join`].
unsafe fn path_of_first_rank(
    host: &ForeignRanks,
    own: &std::path::Path,
) -> Result<PathBuf, PluginError> {
    let all_gather = host.all_gather.ok_or(PluginError::Null { argument: "all_gather" })?;
    let mut message = [0u8; PATH_BYTES];
    let text = own.as_os_str().as_encoded_bytes();
    message[..text.len()].copy_from_slice(text);
    let mut all = vec![0u8; PATH_BYTES * host.size as usize];
    // SAFETY: the caller guarantees the function; both buffers have the sizes that it needs.
    let code = unsafe {
        let (own, all) = (message.as_ptr().cast(), all.as_mut_ptr().cast());
        all_gather(host.context, own, PATH_BYTES as u64, all)
    };
    if code != 0 {
        return Err(PluginError::HostRanks(code));
    }
    let first = all[..PATH_BYTES].split(|&byte| byte == 0).next().unwrap_or_default();
    let path = std::str::from_utf8(first);
    Ok(path.map_err(|_| PluginError::NotUtf8 { argument: "path of the first rank" })?.into())
}
