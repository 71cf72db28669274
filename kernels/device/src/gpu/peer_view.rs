//! Peer memory of all GPUs of a host, as addresses that are valid on one of the GPUs.

use hip_runtime_sys::DriverPtr;

use super::device::GpuDevice;
use crate::{DeviceError, check_size};

/// Fields of a [`PeerMemoryView`], passed to its constructor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerMemoryViewParts {
    /// Driver context of the device on which the addresses are valid.
    pub context: DriverPtr,
    /// Index of the rank that uses this device.
    pub rank: usize,
    /// Address of the peer memory of every rank. The peer memory of a rank has two areas of
    /// [`PeerMemoryView::area_bytes`] bytes for each rank of the group.
    pub memory: Vec<DriverPtr>,
    /// Size of the largest matrix that can be all-reduced, in bytes.
    pub limit_bytes: usize,
    /// Address of two 32-bit counters in device memory, which kernels use to count the launches of one-shot
    /// all-reduces.
    pub launch_counters: *const u8,
    /// Address of a 32-bit abort flag in host memory. Kernels stop waiting for other ranks when the flag is
    /// not 0.
    pub aborted: *const u8,
}

/// Peer memory of all ranks, as addresses that the kernels of one rank use for one-shot (custom) all-reduces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerMemoryView {
    parts: PeerMemoryViewParts,
}

// SAFETY: the host never dereferences the addresses; only kernels use them.
unsafe impl Send for PeerMemoryView {}
// SAFETY: the host never dereferences the addresses; only kernels use them.
unsafe impl Sync for PeerMemoryView {}

impl PeerMemoryView {
    /// Creates the view of one rank.
    ///
    /// # Safety
    /// All addresses stay valid for the kernels of the device with this context until the process ends.
    #[must_use]
    pub unsafe fn new(parts: PeerMemoryViewParts) -> Self {
        Self { parts }
    }

    /// Returns the size of an area of peer memory in bytes. The size is twice `limit_bytes`, because one half
    /// of each 8-byte word is data and the other half is the number of the launch that wrote the word.
    #[must_use]
    pub fn area_bytes(limit_bytes: usize) -> usize {
        2 * limit_bytes
    }

    /// Checks that the addresses of the view belong to `device`.
    ///
    /// Errors: the addresses belong to another device.
    pub fn check_device(
        &self,
        kernel: &'static str,
        device: &GpuDevice,
    ) -> Result<(), DeviceError> {
        let (view, own) = (self.parts.context.addr(), device.runtime().context().addr());
        check_size(kernel, "context of the peer memory", view, own)
    }

    /// Index of the rank whose kernels use the addresses.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.parts.rank
    }

    /// Number of ranks that share peer memory.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.parts.memory.len()
    }

    /// Size of the largest matrix that can be all-reduced, in bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.parts.limit_bytes
    }

    /// Returns the addresses of the peer memory of all ranks: first of this rank, then of the other ranks in
    /// ascending order.
    #[must_use]
    pub fn addresses(&self) -> Vec<u64> {
        let (lower, from_own) = self.parts.memory.split_at(self.parts.rank);
        let ordered = from_own[..1].iter().chain(lower).chain(&from_own[1..]);
        ordered.map(|&memory| memory as u64).collect()
    }

    /// Returns the address of the counters of one-shot all-reduce launches.
    #[must_use]
    pub fn launch_counters(&self) -> *const u8 {
        self.parts.launch_counters
    }

    /// Returns the address of the abort flag, which makes kernels stop waiting for other ranks.
    #[must_use]
    pub fn aborted(&self) -> *const u8 {
        self.parts.aborted
    }
}
