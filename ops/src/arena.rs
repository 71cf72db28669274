//! Arena for the results of ops: the memory of a result is reused as soon as the result is dropped.
//!
//! Free buffers are kept in stacks by size class (four size classes per power of two). The most recently used
//! buffer is reused first, so that a layer works in memory that is still in cache, and an equal sequence of
//! ops gets equal addresses. A smaller step uses the buffers that a larger step has allocated, so that the
//! arena does not grow after the largest steps have run; warm-up runs them first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use device::Buffer;
use kernels::KernelBackend;

use crate::OpError;

const MIN_CLASS_BYTES: usize = 4096;
/// A free buffer is used for a result only if its size is at most this multiple of the size class that the
/// result needs. Larger free buffers are kept for larger results.
const MAX_OVERSIZE_FACTOR: usize = 64;

/// Arena of device buffers, which are reused for later tensors.
#[derive(Debug, Default)]
pub(crate) struct BufferArena {
    /// Free buffers by size class. Only one thread uses a device, so the mutex is never contended; it is
    /// needed to make tensors `Send`.
    free: Mutex<BTreeMap<usize, Vec<Buffer>>>,
}

impl BufferArena {
    /// Returns a buffer of at least `bytes` with undefined contents.
    pub(crate) fn take(&self, device: &KernelBackend, bytes: usize) -> Result<Buffer, OpError> {
        let class = size_class(bytes);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let candidates = free.range_mut(class..=class * MAX_OVERSIZE_FACTOR);
        match candidates.into_iter().find_map(|(_, buffers)| buffers.pop()) {
            Some(buffer) => Ok(buffer),
            None => Ok(device.alloc(class)?),
        }
    }

    fn release(&self, buffer: Buffer) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(size_class(buffer.bytes())).or_default().push(buffer);
    }
}

/// Returns the smallest size class that holds `bytes`: a power of two times 4, 5, 6 or 7, divided by 4.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(MIN_CLASS_BYTES);
    let quarter = (bytes.next_power_of_two() / 8).max(1);
    bytes.next_multiple_of(quarter)
}

/// Memory of a tensor, which returns to the tensor's arena when the tensor is dropped. The memory of weights
/// comes from no arena and is freed.
#[derive(Debug)]
pub(crate) struct TensorStorage {
    buffer: Option<Buffer>,
    arena: Option<Arc<BufferArena>>,
}

impl TensorStorage {
    pub(crate) fn new(buffer: Buffer, arena: Option<Arc<BufferArena>>) -> Self {
        Self { buffer: Some(buffer), arena }
    }

    pub(crate) fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("storage has its buffer until it is dropped")
    }

    pub(crate) fn buffer_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("storage has its buffer until it is dropped")
    }
}

impl Drop for TensorStorage {
    fn drop(&mut self) {
        if let (Some(buffer), Some(arena)) = (self.buffer.take(), &self.arena) {
            arena.release(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaller_step_allocates_no_buffer() {
        let device = kernels::cpu::CpuBackend::new(device::CpuConfig::default()).unwrap().into();
        let arena = BufferArena::default();
        let take = |bytes| arena.take(&device, bytes).unwrap();
        let sizes = [1 << 20, 3 << 20, 1 << 20];
        for buffer in sizes.map(take) {
            arena.release(buffer);
        }
        let smaller = sizes.map(|bytes| take(bytes / 16));
        assert_eq!(smaller.each_ref().map(Buffer::bytes), [1 << 20, 1 << 20, 3 << 20]);
        assert_eq!(take(1 << 20).bytes(), 1 << 20, "all buffers are in use: a new one");
        for buffer in smaller {
            arena.release(buffer);
        }
        assert_eq!(take(8_000).bytes(), 8_192, "a buffer of 1 MiB exceeds the oversize factor");
    }

    #[test]
    fn size_classes_waste_at_most_a_quarter() {
        for bytes in (1..200_000).step_by(37) {
            let class = size_class(bytes);
            assert!(
                class >= bytes && class <= bytes.max(MIN_CLASS_BYTES) * 5 / 4,
                "{bytes} in {class}"
            );
            assert_eq!(size_class(class), class, "a class is its own class");
        }
    }
}
