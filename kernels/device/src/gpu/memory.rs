//! Allocation of device memory and pinned host memory through the driver.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use hip_runtime_sys::{DriverPtr, code, flag};

use super::error::GpuError;
use super::gpu_runtime::{GpuRuntime, MemoryKind};
use crate::{Buffer, BufferDeallocator, DeviceStream};

/// Allocations are rounded up to a multiple of this number of bytes, so that vectorised loads of kernels may
/// read past the requested size.
const GRANULARITY: usize = 256;

/// Frees the memory of dropped device buffers or pinned host buffers, according to `kind`.
#[derive(Debug)]
struct GpuDeallocator {
    runtime: Arc<GpuRuntime>,
    kind: MemoryKind,
}

impl BufferDeallocator for GpuDeallocator {
    unsafe fn release(&self, ptr: NonNull<u8>, _: usize) {
        // SAFETY: the buffer was allocated by this allocator; the caller guarantees that it is not used
        // again.
        unsafe { self.runtime.free(self.kind, ptr.as_ptr().cast()) }
    }
}

/// Allocates device memory without initialising it. Returns the address and the rounded size in bytes.
pub fn reserve(runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<(DriverPtr, usize), GpuError> {
    runtime.not_capturing("allocating memory")?;
    runtime.enter()?;
    runtime.count_allocation();
    let size = bytes.max(1).checked_next_multiple_of(GRANULARITY).unwrap_or(usize::MAX);
    let mut memory = std::ptr::null_mut();
    // SAFETY: the output pointer is valid for writes.
    let code = unsafe { (runtime.driver.alloc)(&raw mut memory, size) };
    check_allocation(runtime, code, "device", size)?;
    Ok((memory, size))
}

/// Allocates zeroed device memory.
pub fn alloc(runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<Buffer, GpuError> {
    let (memory, size) = reserve(runtime, bytes)?;
    let buffer = wrap(runtime, memory, size, MemoryKind::Device);
    let stream = DeviceStream::default();
    // SAFETY: the memory has this size and is not in use yet.
    let code = unsafe { (runtime.driver.fill)(memory, 0, size, runtime.stream(&stream)?) };
    runtime.check(code, "fill")?;
    runtime.synchronize(&stream)?; // Buffers may be used on any stream.
    Ok(buffer)
}

/// Allocates zeroed pinned host memory.
pub fn alloc_host(runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<Buffer, GpuError> {
    runtime.not_capturing("allocating pinned memory")?;
    runtime.enter()?;
    runtime.count_allocation();
    let size = bytes.max(1).checked_next_multiple_of(GRANULARITY).unwrap_or(usize::MAX);
    let mut memory = std::ptr::null_mut();
    // SAFETY: the output pointer is valid for writes.
    let code = unsafe { (runtime.driver.host_alloc)(&raw mut memory, size, flag::HOST_PORTABLE) };
    check_allocation(runtime, code, "pinned host", size)?;
    // SAFETY: the allocation is host memory of this size.
    unsafe { memory.cast::<u8>().write_bytes(0, size) };
    Ok(wrap(runtime, memory, size, MemoryKind::Host))
}

fn wrap(runtime: &Arc<GpuRuntime>, memory: DriverPtr, size: usize, kind: MemoryKind) -> Buffer {
    let allocator = Arc::new(GpuDeallocator { runtime: runtime.clone(), kind });
    let ptr = NonNull::new(memory.cast()).expect("a successful allocation has an address");
    // SAFETY: the memory is a new allocation of this size, aligned to 256 bytes, which `allocator` frees.
    // Callers initialise it.
    unsafe { Buffer::from_raw(ptr, size, allocator) }
}

/// Checks the result of an allocation. An out-of-memory error contains the free and the total memory.
fn check_allocation(
    runtime: &GpuRuntime,
    code: i32,
    place: &'static str,
    bytes: usize,
) -> Result<(), GpuError> {
    if code == code::OUT_OF_MEMORY {
        let (free_bytes, total_bytes) = runtime.mem_info();
        let device = runtime.properties.name.clone();
        return Err(GpuError::OutOfMemory { place, bytes, free_bytes, total_bytes, device });
    }
    runtime.check(code, "alloc")
}

/// Scratch memory that is shared by all launches on one stream. Requests of the same size always return the
/// same address.
///
/// If a request exceeds the existing blocks, a larger block is allocated; the old blocks are kept, because
/// captured graphs contain their addresses.
#[derive(Debug, Default)]
pub struct ScratchMemory {
    blocks: Mutex<Vec<Buffer>>,
}

impl ScratchMemory {
    /// Returns the address of at least `bytes` bytes of scratch memory.
    pub fn at_least(&self, runtime: &Arc<GpuRuntime>, bytes: usize) -> Result<*mut u8, GpuError> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = blocks.iter_mut().find(|block| block.bytes() >= bytes) {
            return Ok(block.as_mut_ptr());
        }
        let twice = blocks.last().map_or(0, |last| last.bytes() * 2);
        let mut block = alloc(runtime, bytes.max(twice))?;
        let address = block.as_mut_ptr();
        blocks.push(block);
        Ok(address)
    }
}
