//! Pinned host memory for asynchronous copies, and copies in flight. A copy in flight owns its pinned memory
//! until the copy has completed.

use crate::{Buffer, DeviceError};

/// Pinned host memory, which the device can access during asynchronous copies.
#[derive(Debug)]
pub struct PinnedBuffer {
    memory: Buffer,
}

impl PinnedBuffer {
    /// Wraps a buffer of host memory.
    ///
    /// # Safety
    /// The host can read and write the memory of the buffer.
    pub unsafe fn from_host(memory: Buffer) -> Self {
        Self { memory }
    }

    /// Returns the content of the buffer.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the buffer is host memory that was initialised when it was allocated; during a copy,
        // `CopyInFlight` owns the buffer.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.bytes()) }
    }

    /// Returns the content of the buffer for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the buffer is host memory that was initialised when it was allocated; it is uniquely
        // borrowed and not part of a copy in flight.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr(), self.memory.bytes()) }
    }
}

/// Fence that signals the completion of an asynchronous copy. A fence completes after all work that was
/// submitted to its stream before the fence was recorded.
pub(crate) trait CopyFence: Send + std::fmt::Debug {
    /// Blocks the host until the fence has completed.
    fn wait(&mut self) -> Result<(), DeviceError>;
}

/// Asynchronous copy in flight, which owns its pinned buffer until the copy has completed.
#[derive(Debug)]
pub struct CopyInFlight {
    memory: Option<PinnedBuffer>,
    fence: Box<dyn CopyFence>,
}

impl CopyInFlight {
    /// Creates a copy in flight that owns the pinned buffer `memory` until `fence` completes.
    pub(crate) fn new(memory: PinnedBuffer, fence: Box<dyn CopyFence>) -> Self {
        Self { memory: Some(memory), fence }
    }

    /// Waits for the copy and returns the pinned buffer. After an error, the buffer is leaked deliberately,
    /// because the device may still access the buffer.
    pub fn wait(mut self) -> Result<PinnedBuffer, DeviceError> {
        let memory = self.memory.take().expect("present until the copy completes");
        match self.fence.wait() {
            Ok(()) => Ok(memory),
            Err(error) => {
                std::mem::forget(memory);
                Err(error)
            }
        }
    }
}

impl Drop for CopyInFlight {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take()
            && self.fence.wait().is_err()
        {
            std::mem::forget(memory); // Leaked: the device may still access the memory.
        }
    }
}

/// Fence of a copy on a device that runs launches synchronously. The fence is always complete.
#[derive(Debug)]
pub(crate) struct CompletedFence;

impl CopyFence for CompletedFence {
    fn wait(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
