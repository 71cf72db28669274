//! Exchange of peer memory handles between the ranks of a device group.

use std::sync::Arc;

use device::gpu::PeerMemoryView;
use kernels::gpu::GpuBackend;

use crate::group_rendezvous::exchange_words;
use crate::peer_memory::{PeerMemory, PeerMemoryHandle, PeerMemoryRank};
use crate::{CollectiveError, GroupRendezvous};

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
        rendezvous: &dyn GroupRendezvous,
        device: &Arc<GpuBackend>,
        limit_bytes: usize,
    ) -> Result<Result<Self, CollectiveError>, CollectiveError> {
        const WORDS: usize = PeerMemoryHandle::WORDS;
        let id = PeerMemoryRank { rank: rendezvous.rank(), ranks: rendezvous.size() };
        let own = PeerMemory::allocate(device.device(), id, limit_bytes);
        let own_handle = own.as_ref().map_or([0; WORDS], |own| own.handle().to_words());
        let words = exchange_words(rendezvous, &own_handle)?;
        let handles: Vec<PeerMemoryHandle> =
            words.as_chunks().0.iter().map(PeerMemoryHandle::from_words).collect();
        let opened = own.and_then(|mut own| {
            let view = own.open_peers(&handles)?;
            Ok(Self { memory: Arc::new(own), view })
        });
        let statuses = exchange_words(rendezvous, &[i32::from(opened.is_ok())])?;
        Ok(match statuses.iter().position(|&status| status != 1) {
            Some(rank) => {
                Err(opened.err().map_or(CollectiveError::NoPeerAccess { rank }, Into::into))
            }
            None => Ok(opened?),
        })
    }
}
