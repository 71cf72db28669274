//! Memory of the CPU device: zeroed, 64-byte aligned; large ranges lie on huge pages.
//!
//! Streaming gigabytes of weights through 4 KiB pages costs a tenth of the bandwidth in page walks, so
//! ranges of 2 MiB and more are mapped on their own and the kernel is asked for huge pages. Such a
//! range is zero without being touched: an idle KV pool uses no memory until blocks are written.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Buffer, BufferDeallocator, DeviceError};

const CACHE_LINE: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// Hands out buffers and counts their bytes.
#[derive(Debug, Default)]
pub(super) struct CpuMemory {
    used: AtomicU64,
}

impl CpuMemory {
    pub(super) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Buffer, DeviceError> {
        let out_of_memory = DeviceError::OutOfMemory { bytes, device: "cpu" };
        let size =
            bytes.max(1).checked_next_multiple_of(CACHE_LINE).ok_or(out_of_memory.clone())?;
        let ptr = reserve(size).ok_or(out_of_memory)?;
        self.used.fetch_add(size as u64, Ordering::Relaxed);
        // SAFETY: `reserve` gave `size` zeroed bytes to us alone, and `release` frees them.
        Ok(unsafe { Buffer::from_raw(ptr, size, self.clone()) })
    }
}

impl BufferDeallocator for CpuMemory {
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        self.used.fetch_sub(bytes as u64, Ordering::Relaxed);
        // SAFETY: the range came out of `reserve` with this size, as the caller promises.
        unsafe { give_back(ptr, bytes) }
    }
}

fn reserve(bytes: usize) -> Option<NonNull<u8>> {
    if bytes >= HUGE_PAGE && mapped::AVAILABLE {
        return mapped::reserve(bytes);
    }
    let layout = Layout::from_size_align(bytes, CACHE_LINE).ok()?;
    // SAFETY: the size is not zero.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
}

/// # Safety
/// `ptr` came from `reserve(bytes)` and is not used again.
unsafe fn give_back(ptr: NonNull<u8>, bytes: usize) {
    if bytes >= HUGE_PAGE && mapped::AVAILABLE {
        // SAFETY: passed on.
        return unsafe { mapped::give_back(ptr, bytes) };
    }
    if let Ok(layout) = Layout::from_size_align(bytes, CACHE_LINE) {
        // SAFETY: the layout it was allocated with.
        unsafe { std::alloc::dealloc(ptr.as_ptr(), layout) }
    }
}

/// Free and total memory of the host, as `/proc/meminfo` tells; zero elsewhere.
pub(super) fn host_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    (bytes("MemAvailable:").unwrap_or(0), bytes("MemTotal:").unwrap_or(0))
}

/// Anonymous mappings with huge pages.
#[cfg(all(target_os = "linux", not(miri)))]
mod mapped {
    use std::ffi::{c_int, c_long, c_void};
    use std::ptr::NonNull;

    use super::HUGE_PAGE;

    pub(super) const AVAILABLE: bool = true;
    const READ_WRITE: c_int = 3;
    const PRIVATE_ANONYMOUS: c_int = 0x22;
    const ADVISE_HUGE_PAGES: c_int = 14;

    // Of the C library that std links anyway.
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

    /// Bytes mapped for a range, so that it can be unmapped by its size alone.
    fn mapped_bytes(bytes: usize) -> usize {
        bytes.next_multiple_of(HUGE_PAGE)
    }

    pub(super) fn reserve(bytes: usize) -> Option<NonNull<u8>> {
        let size = mapped_bytes(bytes);
        // One huge page more than needed, so that an aligned range fits; the rest is returned.
        let wide = size.checked_add(HUGE_PAGE)?;
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let base =
            unsafe { mmap(std::ptr::null_mut(), wide, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0) };
        if base.addr() == usize::MAX {
            return None;
        }
        let head = base.addr().next_multiple_of(HUGE_PAGE) - base.addr();
        // SAFETY: the parts before and behind the aligned range belong to this mapping alone.
        unsafe {
            let start = base.byte_add(head);
            if head > 0 {
                munmap(base, head);
            }
            if head < HUGE_PAGE {
                munmap(start.byte_add(size), HUGE_PAGE - head);
            }
            madvise(start, size, ADVISE_HUGE_PAGES); // Only advice: small pages are slower, not wrong.
            NonNull::new(start.cast())
        }
    }

    /// # Safety
    /// As `super::give_back`.
    pub(super) unsafe fn give_back(ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: exactly the range that `reserve` kept.
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
    pub unsafe fn give_back(_ptr: NonNull<u8>, _bytes: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn buffers_are_zero_aligned_and_counted() {
        let memory = Arc::new(CpuMemory::default());
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
    fn absurd_sizes_are_refused() {
        let memory = Arc::new(CpuMemory::default());
        assert!(memory.alloc(usize::MAX).is_err());
        assert!(memory.alloc(usize::MAX / 4).is_err());
    }
}
