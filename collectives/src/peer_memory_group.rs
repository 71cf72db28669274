//! Exchange of peer memory handles between the ranks of a device group.

use std::sync::Arc;

use device::gpu::PeerMemoryView;
use device::{DeviceStream, MatMut, MatRef};
use kernels::gpu::GpuBackend;

use crate::peer_memory::{PeerMemory, PeerMemoryHandle, PeerMemoryRank};
use crate::shared_memory_group::SharedMemoryGroup;
use crate::{CollectiveBackend, CollectiveError};

/// Peer memory of all ranks, as addresses that are valid on this device.
#[derive(Debug)]
pub(crate) struct PeerMemoryGroup {
    /// This rank's peer memory. It is not dropped while kernels may wait for other ranks, because dropping it
    /// aborts all waits.
    pub(crate) memory: Arc<PeerMemory>,
    pub(crate) view: PeerMemoryView,
}

impl PeerMemoryGroup {
    /// Opens the peer memory of all ranks, for all-reduces of matrices of up to `limit_bytes` bytes. The
    /// inner `Result` is an error if any rank has no peer access.
    pub(crate) fn open(
        shared: &SharedMemoryGroup,
        device: &Arc<GpuBackend>,
        limit_bytes: usize,
    ) -> Result<Result<Self, CollectiveError>, CollectiveError> {
        const WORDS: usize = PeerMemoryHandle::WORDS;
        let id = PeerMemoryRank { rank: shared.rank(), ranks: shared.size() };
        let own = PeerMemory::allocate(device.device(), id, limit_bytes);
        let own_handle = own.as_ref().map_or([0; WORDS], |own| own.handle().to_words());
        let words = gather_words(shared, &own_handle)?;
        let handles: Vec<PeerMemoryHandle> =
            words.as_chunks().0.iter().map(PeerMemoryHandle::from_words).collect();
        let opened = own.and_then(|mut own| {
            let view = own.open_peers(&handles)?;
            Ok(Self { memory: Arc::new(own), view })
        });
        let statuses = gather_words(shared, &[i32::from(opened.is_ok())])?;
        Ok(match statuses.iter().position(|&status| status != 1) {
            Some(rank) => {
                Err(opened.err().map_or(CollectiveError::NoPeerAccess { rank }, Into::into))
            }
            None => Ok(opened?),
        })
    }
}

/// Gathers 32-bit words of all ranks, in rank order. All ranks must pass the same number of words.
fn gather_words(shared: &SharedMemoryGroup, own: &[i32]) -> Result<Vec<i32>, CollectiveError> {
    let mut all = vec![0; shared.size() * own.len()];
    let (s, cols) = (DeviceStream::default(), all.len());
    shared.all_gather(&s, MatRef::of(own, 1, own.len())?, MatMut::of(&mut all, 1, cols)?)?;
    Ok(all)
}
