//! Peer memory: memory that the GPUs of one host read and write together. The kernels of
//! `one_shot_all_reduce` use it.
//!
//! Each rank allocates memory, all ranks exchange handles, and each rank opens the memory of its peers: by
//! IPC handle for other processes, by address within a process. The memory is never freed before the process
//! exits, because a kernel of another rank may still write to it.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use device::gpu::{GpuDevice, GpuError, GpuRuntime, MemoryKind, PeerView, PeerViewParts, memory};
use device::{Buffer, DeviceDriver, DeviceError, DeviceStream, check_at_most, check_size};
use hip_runtime_sys::{DriverPtr, IpcHandle, code, flag};

/// Maximum number of ranks that the kernels support.
const MAX_RANKS: usize = 8;
/// Size of eight f32 elements in bytes; the size of the largest matrix is rounded up to a multiple.
const SIZE_GRANULARITY: usize = 8 * size_of::<f32>();
/// Alignment of allocation sizes in bytes. The driver may place smaller allocations into one block, and their
/// handle would open the whole block.
const HANDLE_ALIGNMENT: usize = 2 << 20;

/// Handle of the memory of one rank, sent to its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerMemoryHandle {
    process: u32,
    /// Address in that process.
    address: u64,
    context: u64,
    handle: IpcHandle,
}

/// Position of a rank among the ranks that share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerRankId {
    /// This rank, below `ranks`.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
}

/// Memory of this rank and, after [`PeerMemory::open_peers`], of its peers.
pub struct PeerMemory {
    device: Arc<GpuDevice>,
    rank: usize,
    /// Addresses of the memory of all ranks on this GPU; null for peers before [`PeerMemory::open_peers`].
    memory: Vec<DriverPtr>,
    /// Size of the largest matrix, in bytes.
    limit_bytes: usize,
    /// Launch counters. Never freed, because a kernel may update them until the process exits.
    launch_counters: ManuallyDrop<Buffer>,
    /// Abort flag, a word of host memory: kernels stop waiting once it is not 0. Never freed.
    aborted: ManuallyDrop<Buffer>,
    handle: IpcHandle,
}

// SAFETY: only kernels use the addresses; the host writes only the abort flag, atomically.
unsafe impl Send for PeerMemory {}
// SAFETY: only kernels use the addresses; the host writes only the abort flag, atomically.
unsafe impl Sync for PeerMemory {}

impl PeerMemoryHandle {
    /// Number of 32-bit words of a handle.
    pub const WORDS: usize = 21;

    /// Encodes the handle as words, to be sent to other ranks.
    #[must_use]
    pub fn to_words(self) -> [i32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[0] = self.process as i32;
        for (at, long) in [(1, self.address), (3, self.context)] {
            (words[at], words[at + 1]) = (long as i32, (long >> 32) as i32);
        }
        for (word, bytes) in words[5..].iter_mut().zip(self.handle.0.as_chunks().0) {
            *word = i32::from_le_bytes(*bytes);
        }
        words
    }

    /// Decodes a handle received from another rank.
    #[must_use]
    pub fn from_words(words: &[i32; Self::WORDS]) -> Self {
        let long = |at: usize| u64::from(words[at + 1] as u32) << 32 | u64::from(words[at] as u32);
        let mut handle = IpcHandle([0; 64]);
        for (bytes, word) in handle.0.as_chunks_mut().0.iter_mut().zip(&words[5..]) {
            *bytes = word.to_le_bytes();
        }
        Self { process: words[0] as u32, address: long(1), context: long(3), handle }
    }
}

impl PeerMemory {
    /// Allocates the memory of one rank for all-reduces of up to `limit_bytes` per matrix.
    ///
    /// Errors: more ranks than the kernels support; a driver without shareable memory.
    pub fn allocate(
        device: &Arc<GpuDevice>,
        id: PeerRankId,
        limit_bytes: usize,
    ) -> Result<Self, DeviceError> {
        let PeerRankId { rank, ranks: size } = id;
        check_at_most("one_shot_all_reduce", "ranks", size, MAX_RANKS)?;
        let runtime = device.runtime();
        let limit_bytes = limit_bytes.next_multiple_of(SIZE_GRANULARITY);
        let own = alloc_shared(runtime, 2 * size * PeerView::area_bytes(limit_bytes))?;
        // SAFETY: device memory; its address has not been published.
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

    /// Handle of this rank's memory, to be sent to the other ranks.
    #[must_use]
    pub fn handle(&self) -> PeerMemoryHandle {
        PeerMemoryHandle {
            process: std::process::id(),
            address: self.memory[self.rank] as u64,
            context: self.device.runtime().context() as u64,
            handle: self.handle,
        }
    }

    /// Sets the launch counter to `launches`, for tests of its wrap-around. All ranks must pass the same
    /// number, with no launch in flight on any rank.
    pub fn set_launch_count(&mut self, launches: u32) -> Result<(), DeviceError> {
        self.device.upload(&mut self.launch_counters, 0, &launches.to_le_bytes())
    }

    /// Opens the memory of all ranks. `handles` has the handles of all ranks, in rank order. Returns the
    /// addresses for kernels of this device.
    ///
    /// Errors: wrong number of handles; a rank without peer memory; no peer access between the devices.
    pub fn open_peers(&mut self, handles: &[PeerMemoryHandle]) -> Result<PeerView, DeviceError> {
        check_size("one_shot_all_reduce", "peer memory handles", handles.len(), self.memory.len())?;
        let runtime = self.device.runtime();
        runtime.enter()?;
        for (rank, peer) in handles.iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
            if peer.address == 0 {
                return Err(GpuError::NoPeerMemory { rank }.into());
            }
            self.memory[rank] = if peer.process == std::process::id() {
                self.open_peer_context(peer.context as *mut c_void)?;
                peer.address as *mut c_void
            } else {
                self.open_ipc(peer.handle)?
            };
        }
        let parts = PeerViewParts {
            context: runtime.context(),
            rank: self.rank,
            memory: self.memory.clone(),
            limit_bytes: self.limit_bytes,
            launch_counters: self.launch_counters.as_ptr(),
            aborted: self.aborted.as_ptr(),
        };
        // SAFETY: the addresses of all ranks are set above. The memory of ranks is never freed, and neither
        // buffer is dropped.
        Ok(unsafe { PeerView::new(parts) })
    }

    /// Enables access to the memory of another device of this process.
    fn open_peer_context(&self, context: DriverPtr) -> Result<(), GpuError> {
        let runtime = self.device.runtime();
        let unsupported =
            GpuError::PeerAccessUnsupported { what: "peer access between devices of one process" };
        let enable = runtime.driver.peer_enable.ok_or(unsupported)?;
        // SAFETY: the owner keeps the context until the process exits.
        match unsafe { enable(context, 0) } {
            code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => runtime.check(code, "enable peer access"),
        }
    }

    /// Opens the memory of another process.
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

    /// Aborts all current and later waits on this device; results of aborted work are undefined. Callable
    /// from any thread.
    pub fn abort(&self) {
        // SAFETY: a word of host memory that is never freed, and that the host accesses only atomically.
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

/// Returns the IPC handle with which other processes open an allocation.
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
        let (address, context) = (0x7fff_1234_8765_4321, 0xfedc_ba98_0123_4567);
        let expected = PeerMemoryHandle { process: 0x8000_0001, address, context, handle };
        assert_eq!(PeerMemoryHandle::from_words(&expected.to_words()), expected);
    }
}
