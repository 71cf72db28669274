//! Peer memory of the GPUs of one host, as addressed by one of them.

use hip_runtime_sys::DriverPtr;

/// Peer memory of all ranks, addressed from the kernels of one rank, for custom (one-shot) all-reduce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerView {
    rank: usize,
    memory: Vec<DriverPtr>,
    limit_bytes: usize,
    count: *const u8,
    aborted: *const u8,
}

// SAFETY: the host never dereferences the addresses; only kernels use them.
unsafe impl Send for PeerView {}
// SAFETY: the host never dereferences the addresses; only kernels use them.
unsafe impl Sync for PeerView {}

impl PeerView {
    /// Creates the view of rank `rank`. `memory`: peer memory of every rank, each with two areas of
    /// [`area_bytes`](Self::area_bytes) bytes per rank, for matrices of up to `limit_bytes` bytes. `count`:
    /// two 32-bit counters on the device. `aborted`: 32-bit word of host memory; kernels stop waiting once it
    /// is not 0.
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

    /// Returns the size of an area in bytes: twice `limit_bytes`, because half of each word is data and half
    /// is the sequence number (flag) of the launch that wrote it.
    #[must_use]
    pub fn area_bytes(limit_bytes: usize) -> usize {
        2 * limit_bytes
    }

    /// Index of this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.memory.len()
    }

    /// Size of the largest matrix, in bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    /// Returns the addresses of the peer memory: this rank first, then the other ranks in ascending order.
    #[must_use]
    pub fn addresses(&self) -> Vec<u64> {
        let (before, from_own) = self.memory.split_at(self.rank);
        let ordered = from_own[..1].iter().chain(before).chain(&from_own[1..]);
        ordered.map(|&memory| memory as u64).collect()
    }

    /// Returns the address of the counters.
    #[must_use]
    pub fn count(&self) -> *const u8 {
        self.count
    }

    /// Returns the address of the abort flag.
    #[must_use]
    pub fn aborted(&self) -> *const u8 {
        self.aborted
    }
}
