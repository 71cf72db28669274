//! Memory of the CPU device: zeroed and aligned to 64 bytes; large ranges use huge pages.
//!
//! With 4 KiB pages, page walks take 10 % of the memory bandwidth when gigabytes of weights are read. Ranges
//! of 2 MiB and more are therefore separate memory mappings with `MADV_HUGEPAGE`. The operating system
//! allocates zero pages on the first access, so that an unused KV pool takes no physical memory.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Buffer, BufferDeallocator, DeviceError};

const CACHE_LINE: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// Allocator of CPU buffers, which counts the allocated bytes.
#[derive(Debug, Default)]
pub(super) struct CpuAllocator {
    used: AtomicU64,
    /// Number of allocations so far.
    allocations: AtomicU64,
}

impl CpuAllocator {
    /// Returns the number of allocations so far.
    pub(super) fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    pub(super) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Buffer, DeviceError> {
        let out_of_memory = DeviceError::OutOfMemory { bytes, device: "cpu" };
        let size =
            bytes.max(1).checked_next_multiple_of(CACHE_LINE).ok_or(out_of_memory.clone())?;
        let ptr = reserve(size).ok_or(out_of_memory)?;
        self.used.fetch_add(size as u64, Ordering::Relaxed);
        self.allocations.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `reserve` returned `size` zeroed bytes that are not used elsewhere, and `release` frees
        // them.
        Ok(unsafe { Buffer::from_raw(ptr, size, self.clone()) })
    }
}

impl BufferDeallocator for CpuAllocator {
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        self.used.fetch_sub(bytes as u64, Ordering::Relaxed);
        // SAFETY: the caller guarantees that the range was returned by `reserve` with this size.
        unsafe { free(ptr, bytes) }
    }
}

fn reserve(bytes: usize) -> Option<NonNull<u8>> {
    if bytes >= HUGE_PAGE && mapped::AVAILABLE {
        return mapped::reserve(bytes);
    }
    let layout = Layout::from_size_align(bytes, CACHE_LINE).ok()?;
    // SAFETY: the size is not 0.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
}

/// Frees memory that `reserve` returned.
///
/// # Safety
/// `ptr` was returned by `reserve(bytes)` and is not used again.
unsafe fn free(ptr: NonNull<u8>, bytes: usize) {
    if bytes >= HUGE_PAGE && mapped::AVAILABLE {
        // SAFETY: the caller guarantees that `reserve(bytes)` returned `ptr`.
        return unsafe { mapped::free(ptr, bytes) };
    }
    if let Ok(layout) = Layout::from_size_align(bytes, CACHE_LINE) {
        // SAFETY: the range was allocated with this layout.
        unsafe { std::alloc::dealloc(ptr.as_ptr(), layout) }
    }
}

/// Returns the available and the total memory of the host in bytes, from `/proc/meminfo`; 0 if the file does
/// not exist.
pub(crate) fn host_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    (bytes("MemAvailable:").unwrap_or(0), bytes("MemTotal:").unwrap_or(0))
}

/// Anonymous memory mappings with huge pages.
#[cfg(all(target_os = "linux", not(miri)))]
mod mapped {
    use std::ffi::{c_int, c_long, c_void};
    use std::ptr::NonNull;

    use super::HUGE_PAGE;

    pub(super) const AVAILABLE: bool = true;
    const READ_WRITE: c_int = 3;
    const PRIVATE_ANONYMOUS: c_int = 0x22;
    const ADVISE_HUGE_PAGES: c_int = 14;

    // Declarations of C library functions; std already links the C library.
    unsafe extern "C" {
        fn mmap(
            at: *mut c_void,
            bytes: usize,
            protection: c_int,
            flags: c_int,
            file: c_int,
            offset: c_long,
        ) -> *mut c_void;
        fn munmap(at: *mut c_void, bytes: usize) -> c_int;
        fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int;
    }

    /// Returns the size of the mapping for a range of `bytes` bytes. `free` computes the size with the same
    /// function.
    fn mapped_bytes(bytes: usize) -> usize {
        bytes.next_multiple_of(HUGE_PAGE)
    }

    pub(super) fn reserve(bytes: usize) -> Option<NonNull<u8>> {
        let size = mapped_bytes(bytes);
        // The mapping is one huge page larger than needed, so that it contains a range that is aligned to a
        // huge page; the rest is unmapped.
        let wide = size.checked_add(HUGE_PAGE)?;
        // SAFETY: a new anonymous mapping does not affect existing memory.
        let base =
            unsafe { mmap(std::ptr::null_mut(), wide, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0) };
        if base.addr() == usize::MAX {
            return None;
        }
        let head = base.addr().next_multiple_of(HUGE_PAGE) - base.addr();
        // SAFETY: the parts before and after the aligned range belong to this mapping only.
        unsafe {
            let start = base.byte_add(head);
            if head > 0 {
                munmap(base, head);
            }
            if head < HUGE_PAGE {
                munmap(start.byte_add(size), HUGE_PAGE - head);
            }
            madvise(start, size, ADVISE_HUGE_PAGES); // May fail: small pages are only slower.
            NonNull::new(start.cast())
        }
    }

    /// Unmaps memory that `reserve` returned.
    ///
    /// # Safety
    /// `ptr` was returned by `reserve(bytes)` and is not used again.
    pub(super) unsafe fn free(ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: this is exactly the range that `reserve` kept.
        unsafe { munmap(ptr.as_ptr().cast(), mapped_bytes(bytes)) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod mapped {
    use std::ptr::NonNull;

    pub const AVAILABLE: bool = false;

    pub fn reserve(_bytes: usize) -> Option<NonNull<u8>> {
        None
    }

    /// # Safety
    /// Never called.
    pub unsafe fn free(_ptr: NonNull<u8>, _bytes: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn buffers_are_zero_aligned_and_counted() {
        let memory = Arc::new(CpuAllocator::default());
        for bytes in [0, 1, 64, 4097, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 5] {
            let buffer = memory.alloc(bytes).unwrap();
            assert_eq!(buffer.as_ptr() as usize % CACHE_LINE, 0);
            assert!(buffer.bytes() >= bytes);
            let words = buffer.mat(DType::I32, 1, bytes / 4).unwrap();
            assert!(words.row::<i32>(0).iter().all(|&w| w == 0));
            assert_eq!(memory.used.load(Ordering::Relaxed), buffer.bytes() as u64);
        }
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn oversized_allocations_fail() {
        let memory = Arc::new(CpuAllocator::default());
        assert!(memory.alloc(usize::MAX).is_err());
        assert!(memory.alloc(usize::MAX / 4).is_err());
    }
}
