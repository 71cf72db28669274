//! Memory for weights: many are small, and every allocation of a driver takes a multiple of 2 MiB and a
//! millisecond, so small ones share slabs.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::GpuError;
use super::gpu_runtime::{GpuRuntime, MemoryKind};
use super::memory;
use crate::{Buffer, BufferDeallocator, DeviceStream};

/// Bytes of a slab.
const SLAB: usize = 64 << 20;
/// Larger matrices get memory of their own.
const SMALL: usize = 8 << 20;
const LINE: usize = 256;

/// The slab that is being filled.
#[derive(Debug, Default)]
pub struct WeightMemory {
    open: Mutex<Option<(Arc<WeightSlab>, usize)>>,
}

/// Memory that is freed when the last matrix in it is.
#[derive(Debug)]
struct WeightSlab {
    runtime: Arc<GpuRuntime>,
    memory: NonNull<u8>,
}

// SAFETY: an address; whoever holds a share keeps the memory alive, nobody uses it through the slab.
unsafe impl Send for WeightSlab {}
// SAFETY: as above.
unsafe impl Sync for WeightSlab {}

impl BufferDeallocator for WeightSlab {
    /// The matrix's share of the slab goes with it.
    unsafe fn release(&self, _: NonNull<u8>, _: usize) {}
}

impl Drop for WeightSlab {
    fn drop(&mut self) {
        // SAFETY: allocated for this slab, and every matrix in it is gone.
        unsafe { self.runtime.free(MemoryKind::Device, self.memory.as_ptr().cast()) }
    }
}

impl WeightSlab {
    fn new(runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<Arc<Self>, GpuError> {
        let (memory, size) = memory::reserve(runtime, bytes)?;
        let memory = NonNull::new(memory.cast()).expect("an allocation has an address");
        let slab = Arc::new(Self { runtime: runtime.clone(), memory });
        let stream = runtime.stream(&DeviceStream::default())?;
        // SAFETY: memory of this size, which nobody knows yet.
        let code = unsafe { (runtime.driver.fill)(memory.as_ptr().cast(), 0, size, stream) };
        runtime.check(code, "fill")?;
        runtime.synchronize(&DeviceStream::default())?; // Copies of weights run on a stream of their own.
        Ok(slab)
    }

    /// # Safety
    /// The range is inside the slab and handed out once.
    unsafe fn take(self: &Arc<Self>, at: usize, bytes: usize) -> Buffer {
        // SAFETY: inside the slab, zero since its beginning, aligned to 256, kept alive by the share.
        unsafe { Buffer::from_raw(self.memory.add(at), bytes, self.clone()) }
    }
}

impl WeightMemory {
    /// Zeroed device memory.
    pub fn alloc(&self, runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<Buffer, GpuError> {
        let size = bytes.max(1).next_multiple_of(LINE);
        if size >= SMALL {
            // SAFETY: the whole slab, once.
            return Ok(unsafe { WeightSlab::new(runtime, size)?.take(0, size) });
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, used) = match open.take() {
            Some((slab, used)) if used + size <= SLAB => (slab, used),
            _ => (WeightSlab::new(runtime, SLAB)?, 0),
        };
        // SAFETY: `used` only grows, so no range is handed out twice.
        let buffer = unsafe { slab.take(used, size) };
        *open = Some((slab, used + size));
        Ok(buffer)
    }
}
