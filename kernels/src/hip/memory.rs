//! Memory of the device, and memory of the host that it copies from and to.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use hip_runtime_sys::{Ptr, code, flag};

use super::error::HipError;
use super::runtime::{Home, Runtime};
use crate::{Buffer, Release, Stream};

/// Sizes are multiples of it, so that wide loads may run over the end of what was asked for.
const LINE: usize = 256;

/// Frees buffers into one of the two allocators.
#[derive(Debug)]
struct Allocator {
    runtime: Arc<Runtime>,
    home: Home,
}

impl Release for Allocator {
    unsafe fn release(&self, ptr: NonNull<u8>, _: usize) {
        // SAFETY: handed out by `alloc` below; the caller promises that it is not used again.
        unsafe { self.runtime.free(self.home, ptr.as_ptr().cast()) }
    }
}

/// Device memory, not initialised.
pub(super) fn reserve(runtime: &Arc<Runtime>, bytes: usize) -> Result<(Ptr, usize), HipError> {
    runtime.not_capturing("allocating memory")?;
    runtime.enter()?;
    let size = bytes.max(1).checked_next_multiple_of(LINE).unwrap_or(usize::MAX);
    let mut memory = std::ptr::null_mut();
    // SAFETY: a place to write to.
    let code = unsafe { (runtime.driver.alloc)(&raw mut memory, size) };
    found(runtime, code, "device", size)?;
    Ok((memory, size))
}

/// Device memory, zero.
pub(super) fn alloc(runtime: &Arc<Runtime>, bytes: usize) -> Result<Buffer, HipError> {
    let (memory, size) = reserve(runtime, bytes)?;
    let buffer = wrap(runtime, memory, size, Home::Device);
    let stream = Stream::default();
    // SAFETY: memory of this size, which nobody knows yet.
    let code = unsafe { (runtime.driver.fill)(memory, 0, size, runtime.stream(&stream)?) };
    runtime.check(code, "fill")?;
    runtime.synchronize(&stream)?; // Any stream may use it from now on.
    Ok(buffer)
}

/// Host memory, zero.
pub(super) fn alloc_host(runtime: &Arc<Runtime>, bytes: usize) -> Result<Buffer, HipError> {
    runtime.not_capturing("allocating pinned memory")?;
    runtime.enter()?;
    let size = bytes.max(1).checked_next_multiple_of(LINE).unwrap_or(usize::MAX);
    let mut memory = std::ptr::null_mut();
    // SAFETY: a place to write to.
    let code = unsafe { (runtime.driver.host_alloc)(&raw mut memory, size, flag::HOST_PORTABLE) };
    found(runtime, code, "pinned host", size)?;
    // SAFETY: host memory of this size.
    unsafe { memory.cast::<u8>().write_bytes(0, size) };
    Ok(wrap(runtime, memory, size, Home::Host))
}

fn wrap(runtime: &Arc<Runtime>, memory: Ptr, size: usize, home: Home) -> Buffer {
    let allocator = Arc::new(Allocator { runtime: runtime.clone(), home });
    let ptr = NonNull::new(memory.cast()).expect("an allocation that succeeded has an address");
    // SAFETY: fresh memory of this size, aligned to 256, which `allocator` frees. Callers initialise it.
    unsafe { Buffer::from_raw(ptr, size, allocator) }
}

/// The result of an allocation, with the numbers that matter if there is no memory left.
fn found(runtime: &Runtime, code: i32, place: &'static str, bytes: usize) -> Result<(), HipError> {
    if code == code::OUT_OF_MEMORY {
        let (free_bytes, total_bytes) = runtime.mem_info();
        let device = runtime.facts.name.clone();
        return Err(HipError::OutOfMemory { place, bytes, free_bytes, total_bytes, device });
    }
    runtime.check(code, "alloc")
}

/// Memory that kernels share between launches of one stream: asked for again and again, never moved.
///
/// A larger wish gets new memory and the old stays, because captured graphs know its address.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    blocks: Mutex<Vec<Buffer>>,
}

impl Scratch {
    /// The address of at least `bytes`.
    pub(super) fn at_least(
        &self,
        runtime: &Arc<Runtime>,
        bytes: usize,
    ) -> Result<*mut u8, HipError> {
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
