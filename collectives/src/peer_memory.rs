//! Peer memory: device memory that all GPUs of a host can read and write. The kernels of
//! `one_shot_all_reduce` exchange data through peer memory.
//!
//! Each rank allocates memory, all ranks exchange handles, and each rank opens the memory of all other ranks:
//! by IPC handle if the other rank is in another process, by address if both ranks are in the same process.
//! The memory is never freed before the process exits, because a kernel of another rank may still write to
//! it.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use device::gpu::{
    GpuDevice, GpuError, GpuRuntime, MemoryKind, PeerDeviceHandle, PeerMemoryView,
    PeerMemoryViewParts, memory,
};
use device::{Buffer, DeviceDriver, DeviceError, DeviceStream, check_at_most, check_size};
use hip_runtime_sys::{DriverPtr, IpcHandle, flag};

/// Maximum number of ranks that the one-shot all-reduce kernels support.
const MAX_RANKS: usize = 8;
/// The size limit of matrices is rounded up to a multiple of this number of bytes (eight f32 elements).
const SIZE_GRANULARITY: usize = 8 * size_of::<f32>();
/// Granularity of allocation sizes in bytes. The driver may place smaller allocations into a shared block,
/// and an IPC handle would then give access to the whole block.
const HANDLE_ALIGNMENT: usize = 2 << 20;

/// Handle with which other ranks open the peer memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerMemoryHandle {
    process: u32,
    /// Address of the peer memory in the process that allocated it.
    address: u64,
    device: PeerDeviceHandle,
    handle: IpcHandle,
}

/// Index of a rank among the ranks that share peer memory, and number of these ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerMemoryRank {
    /// Index of this rank, below `ranks`.
    pub rank: usize,
    /// Number of ranks that share peer memory.
    pub ranks: usize,
}

/// Peer memory of this rank, and, after [`PeerMemory::open_peers`], of the other ranks.
pub struct PeerMemory {
    device: Arc<GpuDevice>,
    rank: usize,
    /// Address of the peer memory of each rank, as mapped on this GPU. The addresses of other ranks are null
    /// before [`PeerMemory::open_peers`].
    memory: Vec<DriverPtr>,
    /// Size of the largest matrix that can be all-reduced, in bytes.
    limit_bytes: usize,
    /// Device counters of one-shot all-reduce launches. They are never freed, because a kernel may update the
    /// counters until the process exits.
    launch_counters: ManuallyDrop<Buffer>,
    /// Abort flag, a 32-bit word of host memory: kernels stop waiting for other ranks when the flag is not 0.
    /// The memory is never freed.
    aborted: ManuallyDrop<Buffer>,
    handle: IpcHandle,
}

// SAFETY: only kernels use the addresses; the host writes only the abort flag, atomically.
unsafe impl Send for PeerMemory {}
// SAFETY: only kernels use the addresses; the host writes only the abort flag, atomically.
unsafe impl Sync for PeerMemory {}

impl PeerMemoryHandle {
    /// Number of 32-bit words of an encoded handle.
    pub const WORDS: usize = 22;

    /// Encodes the handle as 32-bit words, which are sent to other ranks.
    #[must_use]
    pub fn to_words(self) -> [i32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[0] = self.process as i32;
        for (at, long) in [(1, self.address), (3, self.device.context)] {
            (words[at], words[at + 1]) = (long as i32, (long >> 32) as i32);
        }
        words[5] = self.device.ordinal;
        for (word, bytes) in words[6..].iter_mut().zip(self.handle.0.as_chunks().0) {
            *word = i32::from_le_bytes(*bytes);
        }
        words
    }

    /// Decodes a handle that was received from another rank.
    #[must_use]
    pub fn from_words(words: &[i32; Self::WORDS]) -> Self {
        let long = |at: usize| u64::from(words[at + 1] as u32) << 32 | u64::from(words[at] as u32);
        let mut handle = IpcHandle([0; 64]);
        for (bytes, word) in handle.0.as_chunks_mut().0.iter_mut().zip(&words[6..]) {
            *bytes = word.to_le_bytes();
        }
        let device = PeerDeviceHandle { ordinal: words[5], context: long(3) };
        Self { process: words[0] as u32, address: long(1), device, handle }
    }
}

impl PeerMemory {
    /// Allocates the peer memory of a rank, for all-reduces of matrices of up to `limit_bytes` bytes.
    ///
    /// Errors: the kernels do not support the number of ranks, or the driver does not support shareable
    /// memory.
    pub fn allocate(
        device: &Arc<GpuDevice>,
        id: PeerMemoryRank,
        limit_bytes: usize,
    ) -> Result<Self, DeviceError> {
        let PeerMemoryRank { rank, ranks: size } = id;
        check_at_most("one_shot_all_reduce", "ranks", size, MAX_RANKS)?;
        let runtime = device.runtime();
        let limit_bytes = limit_bytes.next_multiple_of(SIZE_GRANULARITY);
        let own = alloc_shared(runtime, 2 * size * PeerMemoryView::area_bytes(limit_bytes))?;
        // SAFETY: `own` is device memory, and no other rank has its address yet.
        let handle = handle_of(runtime, own)
            .inspect_err(|_| unsafe { runtime.free(MemoryKind::Device, own) })?;
        let mut memory = vec![std::ptr::null_mut(); size];
        memory[rank] = own;
        Ok(Self {
            device: Arc::clone(device),
            rank,
            memory,
            limit_bytes,
            launch_counters: ManuallyDrop::new(memory::alloc(runtime, 2 * size_of::<u32>())?),
            aborted: ManuallyDrop::new(memory::alloc_host(runtime, size_of::<u32>())?),
            handle,
        })
    }

    /// Returns the handle of this rank's memory, which is sent to the other ranks.
    #[must_use]
    pub fn handle(&self) -> PeerMemoryHandle {
        PeerMemoryHandle {
            process: std::process::id(),
            address: self.memory[self.rank] as u64,
            device: self.device.runtime().peer_address(),
            handle: self.handle,
        }
    }

    /// Sets the launch counter to `launches`, so that tests can check its wrap-around. All ranks must pass
    /// the same number, and no launch may be in flight on any rank.
    pub fn set_launch_count(&mut self, launches: u32) -> Result<(), DeviceError> {
        self.device.upload(&mut self.launch_counters, 0, &launches.to_le_bytes())
    }

    /// Opens the memory of all ranks; `handles` contains the handles of all ranks in rank order. Returns the
    /// addresses that are valid on this device.
    ///
    /// Errors: the number of handles is wrong, a rank has no peer memory, or the devices have no peer access.
    pub fn open_peers(
        &mut self,
        handles: &[PeerMemoryHandle],
    ) -> Result<PeerMemoryView, DeviceError> {
        check_size("one_shot_all_reduce", "peer memory handles", handles.len(), self.memory.len())?;
        let runtime = self.device.runtime();
        runtime.enter()?;
        for (rank, peer) in handles.iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
            if peer.address == 0 {
                return Err(GpuError::NoPeerMemory { rank }.into());
            }
            self.memory[rank] = if peer.process == std::process::id() {
                runtime.enable_peer_access(peer.device)?;
                peer.address as *mut c_void
            } else {
                self.open_ipc(peer.handle)?
            };
        }
        let parts = PeerMemoryViewParts {
            context: runtime.context(),
            rank: self.rank,
            memory: self.memory.clone(),
            limit_bytes: self.limit_bytes,
            launch_counters: self.launch_counters.as_ptr(),
            aborted: self.aborted.as_ptr(),
        };
        // SAFETY: the addresses of all ranks are set above. The memory of ranks is never freed, and neither
        // buffer is dropped.
        Ok(unsafe { PeerMemoryView::new(parts) })
    }

    /// Opens the peer memory of a rank in another process.
    fn open_ipc(&self, handle: IpcHandle) -> Result<DriverPtr, GpuError> {
        let runtime = self.device.runtime();
        let unsupported = GpuError::PeerAccessUnsupported { what: "IPC memory of other processes" };
        let open = runtime.driver.ipc_open.ok_or(unsupported)?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: `memory` is valid for writes, and the owner keeps the handle valid until its process exits.
        let code = unsafe { open(&raw mut memory, handle, flag::IPC_ENABLE_PEER_ACCESS) };
        runtime.check(code, "open peer memory")?;
        Ok(memory)
    }

    /// Aborts all current and later waits of kernels on this device. The results of aborted kernels are
    /// undefined. May be called from any thread.
    pub fn abort(&self) {
        // SAFETY: the flag is a word of host memory that is never freed, and that the host accesses only
        // atomically.
        let aborted = unsafe { AtomicU32::from_ptr(self.aborted.as_ptr().cast_mut().cast()) };
        aborted.store(1, Ordering::SeqCst);
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        self.abort();
    }
}

impl std::fmt::Debug for PeerMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PeerMemory({} of {})", self.rank, self.memory.len())
    }
}

/// Allocates zeroed device memory that other devices may write while a kernel of this device reads it.
fn alloc_shared(runtime: &GpuRuntime, bytes: usize) -> Result<DriverPtr, GpuError> {
    runtime.not_capturing("allocation of peer memory")?;
    runtime.enter()?;
    let (bytes, mut memory) = (bytes.next_multiple_of(HANDLE_ALIGNMENT), std::ptr::null_mut());
    // SAFETY: `memory` is valid for writes.
    let code = unsafe {
        match runtime.driver.alloc_with {
            Some(alloc_with) => alloc_with(&raw mut memory, bytes, flag::MALLOC_UNCACHED),
            None => (runtime.driver.alloc)(&raw mut memory, bytes),
        }
    };
    runtime.check(code, "alloc of peer memory")?;
    let s = DeviceStream::default();
    // SAFETY: `memory` has `bytes` bytes, and its address has not been published.
    let code = unsafe { (runtime.driver.fill)(memory, 0, bytes, runtime.stream(&s)?) };
    runtime.check(code, "fill")?;
    runtime.synchronize(&s)?;
    Ok(memory)
}

/// Returns the IPC handle with which other processes open the allocation `memory`.
fn handle_of(runtime: &GpuRuntime, memory: DriverPtr) -> Result<IpcHandle, GpuError> {
    let unsupported = GpuError::PeerAccessUnsupported { what: "IPC memory handles" };
    let ipc_handle = runtime.driver.ipc_handle.ok_or(unsupported)?;
    let mut handle = IpcHandle([0; 64]);
    // SAFETY: `handle` is valid for writes, and `memory` is the address of an allocation.
    runtime.check(unsafe { ipc_handle(&raw mut handle, memory) }, "get IPC memory handle")?;
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_handle_round_trips_as_words() {
        let handle = IpcHandle(std::array::from_fn(|i| i as u8 * 3));
        let device = PeerDeviceHandle { ordinal: 7, context: 0xfedc_ba98_0123_4567 };
        let (process, address) = (0x8000_0001, 0x7fff_1234_8765_4321);
        let expected = PeerMemoryHandle { process, address, device, handle };
        assert_eq!(PeerMemoryHandle::from_words(&expected.to_words()), expected);
    }
}
