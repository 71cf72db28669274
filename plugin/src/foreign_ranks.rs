//! Tensor-parallel ranks that are processes of a foreign host.

use std::ffi::c_void;

use collectives::{
    CollectiveError, DeviceGroup, GroupRendezvous, HostGroup, ParallelGroup,
    SharedMemoryRendezvous, form_host_group,
};
use kernels::KernelBackend;
use models::sharding::{ParallelRank, ParallelRanks};

use crate::PluginError;

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

/// Rendezvous of ranks that a foreign host started.
struct ForeignRendezvous<'a>(&'a ForeignRanks);

impl GroupRendezvous for ForeignRendezvous<'_> {
    fn rank(&self) -> usize {
        self.0.rank as usize
    }

    fn size(&self) -> usize {
        self.0.size as usize
    }

    fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let null = CollectiveError::HostExchange { status: -1 };
        let all_gather = self.0.all_gather.ok_or(null)?;
        let mut all = vec![0u8; own.len() * self.size()];
        // SAFETY: the caller of `RankGroup::join` guarantees the function; both buffers have the sizes that it needs.
        let status = unsafe {
            let (message, received) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
            all_gather(self.0.context, message, own.len() as u64, received)
        };
        if status != 0 {
            return Err(CollectiveError::HostExchange { status });
        }
        Ok(all.chunks(own.len()).map(<[u8]>::to_vec).collect())
    }

    /// The host ends all ranks when one of them fails; the group in shared memory detects a failure by itself.
    fn check_health(&self) -> Result<(), CollectiveError> {
        Ok(())
    }
}

/// Tensor-parallel group of a model, and the shared memory through which its ranks communicate.
pub(crate) struct RankGroup {
    pub(crate) group: ParallelGroup,
    pub(crate) ranks: ParallelRanks,
    _memory: Option<SharedMemoryRendezvous>,
}

impl RankGroup {
    /// Returns the group of one rank.
    pub(crate) fn single() -> Self {
        Self { group: ParallelGroup::single(), ranks: ParallelRanks::SINGLE, _memory: None }
    }

    /// Forms the group of the host's ranks, which are processes of one machine.
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
        if host.all_gather.is_none() {
            return Err(PluginError::Null { argument: "all_gather" });
        }
        let HostGroup { group: shared, memory } = form_host_group(&ForeignRendezvous(host))?;
        let group = ParallelGroup::new(match backend.gpu() {
            Some(gpu) => Box::new(DeviceGroup::join(shared, gpu)?),
            None => Box::new(shared),
        });
        let ranks = ParallelRanks { tp: ParallelRank { rank, size }, ep: ParallelRank::SINGLE };
        Ok(Self { group, ranks, _memory: Some(memory) })
    }
}
