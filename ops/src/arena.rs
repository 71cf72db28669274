//! Memory of a step's results, handed out again as soon as a result is dropped.
//!
//! Free buffers lie in stacks by size class (four classes an octave). The most recently used buffer
//! comes back first, so a layer works in what is still in cache, and an equal sequence of ops gets
//! equal addresses. Growth ends when the largest step has run: warm-up runs it first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kernels::{Buffer, Kernels};

use crate::OpError;

const SMALLEST: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// One thread owns a device, so the lock is never contended; it makes tensors `Send`.
    free: Mutex<BTreeMap<usize, Vec<Buffer>>>,
}

impl Arena {
    /// A buffer of at least `bytes`, with the contents its last user left.
    pub(crate) fn take(&self, device: &dyn Kernels, bytes: usize) -> Result<Buffer, OpError> {
        let class = size_class(bytes);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        match free.get_mut(&class).and_then(Vec::pop) {
            Some(buffer) => Ok(buffer),
            None => Ok(device.alloc(class)?),
        }
    }

    fn give_back(&self, buffer: Buffer) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(size_class(buffer.bytes())).or_default().push(buffer);
    }
}

/// Smallest class that holds `bytes`: a power of two times 4, 5, 6 or 7, divided by 4.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(SMALLEST);
    let quarter = (bytes.next_power_of_two() / 8).max(1);
    bytes.next_multiple_of(quarter)
}

/// Memory that goes back to its arena when dropped; weights have no arena and are freed.
#[derive(Debug)]
pub(crate) struct Storage {
    buffer: Option<Buffer>,
    home: Option<Arc<Arena>>,
}

impl Storage {
    pub(crate) fn new(buffer: Buffer, home: Option<Arc<Arena>>) -> Self {
        Self { buffer: Some(buffer), home }
    }

    pub(crate) fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("storage holds its buffer until it is dropped")
    }

    pub(crate) fn buffer_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("storage holds its buffer until it is dropped")
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let (Some(buffer), Some(home)) = (self.buffer.take(), &self.home) {
            home.give_back(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_and_waste_at_most_a_quarter() {
        for bytes in (1..200_000).step_by(37) {
            let class = size_class(bytes);
            assert!(class >= bytes && class <= bytes.max(SMALLEST) * 5 / 4, "{bytes} in {class}");
            assert_eq!(size_class(class), class, "a class is its own class");
        }
    }
}
