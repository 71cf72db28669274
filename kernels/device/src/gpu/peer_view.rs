//! Memory that the GPUs of one host share, as one of them addresses it.

use hip_runtime_sys::DriverPtr;

/// Shared memory of several ranks for the kernels of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerView {
    rank: usize,
    memory: Vec<DriverPtr>,
    limit_bytes: usize,
    count: *const u8,
    aborted: *const u8,
}

// SAFETY: the addresses are used by kernels alone.
unsafe impl Send for PeerView {}
// SAFETY: as above.
unsafe impl Sync for PeerView {}

impl PeerView {
    /// The view of rank `rank`: `memory` of all ranks, two areas of [`area_bytes`](Self::area_bytes) per rank each, for
    /// matrices of up to `limit_bytes`; two 32-bit counters `count` on the device; the 32-bit word `aborted` of the host, not 0
    /// once kernels shall no longer wait.
    ///
    /// # Safety
    /// All addresses stay valid for the kernels of this device until the process ends.
    #[must_use]
    pub unsafe fn new(
        rank: usize,
        memory: Vec<DriverPtr>,
        limit_bytes: usize,
        count: *const u8,
        aborted: *const u8,
    ) -> Self {
        Self { rank, memory, limit_bytes, count, aborted }
    }

    /// Bytes of an area: half of each word holds the number of the launch that wrote the other half.
    #[must_use]
    pub fn area_bytes(limit_bytes: usize) -> usize {
        2 * limit_bytes
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.memory.len()
    }

    /// Bytes of the largest matrix.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    /// Addresses of the ranks' memory, this rank first, the others in ascending order.
    #[must_use]
    pub fn addresses(&self) -> Vec<u64> {
        let (before, from_own) = self.memory.split_at(self.rank);
        let ordered = from_own[..1].iter().chain(before).chain(&from_own[1..]);
        ordered.map(|&memory| memory as u64).collect()
    }

    /// Address of the counters.
    #[must_use]
    pub fn count(&self) -> *const u8 {
        self.count
    }

    /// Address of the word that ends all waiting.
    #[must_use]
    pub fn aborted(&self) -> *const u8 {
        self.aborted
    }
}
