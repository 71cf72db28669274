//! Allocator of weight memory. A driver allocation is a multiple of 2 MiB and takes about 1 ms, and many
//! weights are small; therefore small weights share large allocations (slabs).

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::GpuError;
use super::gpu_runtime::{GpuRuntime, MemoryKind};
use super::memory;
use crate::{Buffer, BufferDeallocator, DeviceStream};

/// Size in bytes of a slab, a device allocation that small weights share.
const SLAB_BYTES: usize = 64 << 20;
/// Minimum size in bytes of a weight that is allocated separately.
const OWN_ALLOCATION_BYTES: usize = 8 << 20;
const ALIGNMENT: usize = 256;

/// Slab allocator of weight memory: the slab that is being filled, and the number of used bytes in it.
#[derive(Debug, Default)]
pub struct WeightAllocator {
    open: Mutex<Option<(Arc<WeightSlab>, usize)>>,
}

/// Device allocation that several weights share. It is freed when the last of these weights is dropped.
#[derive(Debug)]
struct WeightSlab {
    runtime: Arc<GpuRuntime>,
    memory: NonNull<u8>,
}

// SAFETY: the slab only stores the address and never dereferences it; every buffer in it shares ownership and
// keeps the memory alive.
unsafe impl Send for WeightSlab {}
// SAFETY: the slab only stores the address and never dereferences it.
unsafe impl Sync for WeightSlab {}

impl BufferDeallocator for WeightSlab {
    /// Frees nothing: dropping a buffer drops its `Arc<WeightSlab>`, and the last `Arc` frees the slab.
    unsafe fn release(&self, _: NonNull<u8>, _: usize) {}
}

impl Drop for WeightSlab {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated for this slab, and all buffers in it are dropped.
        unsafe { self.runtime.free(MemoryKind::Device, self.memory.as_ptr().cast()) }
    }
}

impl WeightSlab {
    fn new(runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<Arc<Self>, GpuError> {
        let (memory, size) = memory::reserve(runtime, bytes)?;
        let memory = NonNull::new(memory.cast()).expect("an allocation has an address");
        let slab = Arc::new(Self { runtime: runtime.clone(), memory });
        let stream = runtime.stream(&DeviceStream::default())?;
        // SAFETY: the memory has this size and is not in use yet.
        let code = unsafe { (runtime.driver.fill)(memory.as_ptr().cast(), 0, size, stream) };
        runtime.check(code, "fill")?;
        runtime.synchronize(&DeviceStream::default())?; // Weights are copied on another stream.
        Ok(slab)
    }

    /// Returns the bytes `[at, at + bytes)` of the slab as a buffer.
    ///
    /// # Safety
    /// The range is inside the slab and allocated only once.
    unsafe fn take(self: &Arc<Self>, at: usize, bytes: usize) -> Buffer {
        // SAFETY: the range is inside the slab, zero-initialised, aligned to 256 bytes, and kept alive by the
        // `Arc`.
        unsafe { Buffer::from_raw(self.memory.add(at), bytes, self.clone()) }
    }
}

impl WeightAllocator {
    /// Allocates zeroed device memory for a weight: in a slab, or separately if the weight is large.
    pub fn alloc(&self, runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<Buffer, GpuError> {
        let size = bytes.max(1).next_multiple_of(ALIGNMENT);
        if size >= OWN_ALLOCATION_BYTES {
            // SAFETY: the range is the whole new slab and is allocated once.
            return Ok(unsafe { WeightSlab::new(runtime, size)?.take(0, size) });
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, used) = match open.take() {
            Some((slab, used)) if used + size <= SLAB_BYTES => (slab, used),
            _ => (WeightSlab::new(runtime, SLAB_BYTES)?, 0),
        };
        // SAFETY: `used` only grows, so no range is allocated twice.
        let buffer = unsafe { slab.take(used, size) };
        *open = Some((slab, used + size));
        Ok(buffer)
    }
}
