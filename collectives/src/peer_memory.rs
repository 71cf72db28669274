//! Memory that the GPUs of one host write to and read together. What they make in it is `one_shot_all_reduce`'s.
//!
//! Each rank offers memory, all tell each other of their offers, and each reaches the memory of the others: that of other
//! processes by handles, that of its own by the addresses themselves. What is offered is never taken back, because a
//! kernel of another rank may be writing to it; it goes with the process.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use device::gpu::{GpuDevice, GpuError, GpuRuntime, MemoryKind, PeerView, memory};
use device::{Buffer, DeviceDriver, DeviceError, DeviceStream, check_at_most, check_size};
use hip_runtime_sys::{DriverPtr, IpcHandle, code, flag};

/// Most ranks that the kernels are made for.
const MAX_RANKS: usize = 8;
/// Bytes that a matrix grows to whole ones of: eight elements.
const GRAIN: usize = 8 * size_of::<f32>();
/// Driver allocations below it may share one with others, and then a handle opens more than was offered.
const HANDLE_ALIGNMENT: usize = 2 << 20;

/// What a rank tells the others of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerMemoryHandle {
    process: u32,
    /// In that process.
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

/// This rank's memory and, once they are reached, that of the others.
pub struct PeerMemory {
    device: Arc<GpuDevice>,
    rank: usize,
    /// Of all ranks, as this GPU reaches them; null for other ranks before [`PeerMemory::open_peers`].
    memory: Vec<DriverPtr>,
    /// Bytes of the largest matrix.
    limit_bytes: usize,
    /// Launches so far; a kernel may be counting in it for as long as the process lives.
    count: ManuallyDrop<Buffer>,
    /// A word of host memory: not 0, nobody waits any more.
    aborted: ManuallyDrop<Buffer>,
    handle: IpcHandle,
}

// SAFETY: the addresses are used by kernels alone; the one word that the host writes is atomic.
unsafe impl Send for PeerMemory {}
// SAFETY: as above.
unsafe impl Sync for PeerMemory {}

impl PeerMemoryHandle {
    /// Words of an offer.
    pub const WORDS: usize = 21;

    /// The offer as words, to be told.
    #[must_use]
    pub fn words(&self) -> [i32; Self::WORDS] {
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

    /// The offer of which somebody told.
    #[must_use]
    pub fn of_words(words: &[i32; Self::WORDS]) -> Self {
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
    /// Errors: more ranks than kernels support; a driver without shared memory.
    pub fn allocate(
        device: &Arc<GpuDevice>,
        PeerRankId { rank, ranks: size }: PeerRankId,
        limit_bytes: usize,
    ) -> Result<Self, DeviceError> {
        check_at_most("one_shot_all_reduce", "ranks", size, MAX_RANKS)?;
        let runtime = device.runtime();
        let limit_bytes = limit_bytes.next_multiple_of(GRAIN);
        let own = alloc_shared(runtime, 2 * size * PeerView::area_bytes(limit_bytes))?;
        // SAFETY: memory of the device that nobody has been told of.
        let handle = handle_of(runtime, own)
            .inspect_err(|_| unsafe { runtime.free(MemoryKind::Device, own) })?;
        let mut memory = vec![std::ptr::null_mut(); size];
        memory[rank] = own;
        Ok(Self {
            device: Arc::clone(device),
            rank,
            memory,
            limit_bytes,
            count: ManuallyDrop::new(memory::alloc(runtime, 2 * size_of::<u32>())?),
            aborted: ManuallyDrop::new(memory::alloc_host(runtime, size_of::<u32>())?),
            handle,
        })
    }

    /// What the other ranks are to be told.
    #[must_use]
    pub fn handle(&self) -> PeerMemoryHandle {
        PeerMemoryHandle {
            process: std::process::id(),
            address: self.memory[self.rank] as u64,
            context: self.device.runtime().context() as u64,
            handle: self.handle,
        }
    }

    /// Numbers the launches to come as if so many had been: for tests of what comes behind the last number. All ranks
    /// say the same, and none has launched anything that is not done.
    pub fn count_from(&mut self, launches: u32) -> Result<(), DeviceError> {
        self.device.upload(&mut self.count, 0, &launches.to_le_bytes())
    }

    /// Opens the memory of all ranks. `offers` are the handles in rank order. Returns the addresses for kernels of this
    /// device.
    ///
    /// Errors: number of handles; a rank without shared memory; no peer access between the devices.
    pub fn open_peers(&mut self, offers: &[PeerMemoryHandle]) -> Result<PeerView, DeviceError> {
        check_size("one_shot_all_reduce", "offers", offers.len(), self.memory.len())?;
        let runtime = self.device.runtime();
        runtime.enter()?;
        for (rank, offer) in offers.iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
            if offer.address == 0 {
                return Err(GpuError::NoPeerMemory { rank }.into());
            }
            self.memory[rank] = if offer.process == std::process::id() {
                self.open_peer_context(offer.context as *mut c_void)?;
                offer.address as *mut c_void
            } else {
                self.open(offer.handle)?
            };
        }
        let (count, aborted) = (self.count.as_ptr(), self.aborted.as_ptr());
        // SAFETY: the addresses of all ranks are set above. Memory of ranks is never freed, and neither buffer is dropped.
        Ok(unsafe {
            PeerView::new(self.rank, self.memory.clone(), self.limit_bytes, count, aborted)
        })
    }

    /// Memory of a device of this process.
    fn open_peer_context(&self, context: DriverPtr) -> Result<(), GpuError> {
        let runtime = self.device.runtime();
        let none = GpuError::PeerAccessUnsupported { what: "access to devices of one process" };
        let enable = runtime.driver.peer_enable.ok_or(none)?;
        // SAFETY: a context that its owner keeps for as long as the process lives.
        match unsafe { enable(context, 0) } {
            code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => runtime.check(code, "access to another device"),
        }
    }

    /// Memory of another process.
    fn open(&self, handle: IpcHandle) -> Result<DriverPtr, GpuError> {
        let runtime = self.device.runtime();
        let none = GpuError::PeerAccessUnsupported { what: "opening memory of other processes" };
        let open = runtime.driver.ipc_open.ok_or(none)?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: a place to write to, and a handle that its owner keeps good for as long as its process lives.
        let code = unsafe { open(&raw mut memory, handle, flag::IPC_ENABLE_PEER_ACCESS) };
        runtime.check(code, "opening memory of another rank")?;
        Ok(memory)
    }

    /// Ends all waiting on this device, now and from now on: what comes out means nothing. Any thread may call it.
    pub fn abort(&self) {
        // SAFETY: a word of host memory that is never freed, and that the host writes atomically alone.
        let over = unsafe { AtomicU32::from_ptr(self.aborted.as_ptr().cast_mut().cast()) };
        over.store(1, Ordering::SeqCst);
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

/// Memory, zero, that other devices may write to while a kernel of this one reads it.
fn alloc_shared(runtime: &GpuRuntime, bytes: usize) -> Result<DriverPtr, GpuError> {
    runtime.not_capturing("offering memory to ranks")?;
    runtime.enter()?;
    let (bytes, mut memory) = (bytes.next_multiple_of(HANDLE_ALIGNMENT), std::ptr::null_mut());
    // SAFETY: a place to write to.
    let code = unsafe {
        match runtime.driver.alloc_with {
            Some(alloc_with) => alloc_with(&raw mut memory, bytes, flag::MALLOC_UNCACHED),
            None => (runtime.driver.alloc)(&raw mut memory, bytes),
        }
    };
    runtime.check(code, "alloc of memory for ranks")?;
    let s = DeviceStream::default();
    // SAFETY: memory of this size, which nobody knows yet.
    let code = unsafe { (runtime.driver.fill)(memory, 0, bytes, runtime.stream(&s)?) };
    runtime.check(code, "fill")?;
    runtime.synchronize(&s)?;
    Ok(memory)
}

/// By what other processes open an allocation.
fn handle_of(runtime: &GpuRuntime, memory: DriverPtr) -> Result<IpcHandle, GpuError> {
    let none = GpuError::PeerAccessUnsupported { what: "handles of memory" };
    let ipc_handle = runtime.driver.ipc_handle.ok_or(none)?;
    let mut handle = IpcHandle([0; 64]);
    // SAFETY: a place to write to, and the address of an allocation.
    runtime.check(unsafe { ipc_handle(&raw mut handle, memory) }, "handle of memory")?;
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_handle_round_trips_as_words() {
        let handle = IpcHandle(std::array::from_fn(|i| i as u8 * 3));
        let (address, context) = (0x7fff_1234_8765_4321, 0xfedc_ba98_0123_4567);
        let offer = PeerMemoryHandle { process: 0x8000_0001, address, context, handle };
        assert_eq!(PeerMemoryHandle::of_words(&offer.words()), offer);
    }
}
