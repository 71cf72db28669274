//! Host memory that copies run from and to while the host goes on, and the proof that they are over.

use crate::{Buffer, DeviceError};

/// Host memory a device copies from and to by itself.
#[derive(Debug)]
pub struct PinnedBuffer {
    memory: Buffer,
}

impl PinnedBuffer {
    /// Wraps memory of the host.
    ///
    /// # Safety
    /// The host can read and write the buffer's range.
    pub unsafe fn from_host(memory: Buffer) -> Self {
        Self { memory }
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: host memory, initialised when allocated; a device that copies holds it as `CopyInFlight`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.bytes()) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and uniquely borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr(), self.memory.bytes()) }
    }
}

/// The end of everything launched on a stream before it was made.
pub trait CopyFence: Send + std::fmt::Debug {
    /// Waits for it.
    fn wait(&mut self) -> Result<(), DeviceError>;
}

/// Host memory that a copy on the device is using.
#[derive(Debug)]
pub struct CopyInFlight {
    memory: Option<PinnedBuffer>,
    fence: Box<dyn CopyFence>,
}

impl CopyInFlight {
    /// `memory` is in use until `fence`.
    #[must_use]
    pub fn new(memory: PinnedBuffer, fence: Box<dyn CopyFence>) -> Self {
        Self { memory: Some(memory), fence }
    }

    /// Waits for the copy and gives the memory back. After an error the memory is lost on purpose: the
    /// device may still write to it.
    pub fn wait(mut self) -> Result<PinnedBuffer, DeviceError> {
        let memory = self.memory.take().expect("held until the copy is over");
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
            std::mem::forget(memory); // As in `wait`.
        }
    }
}

/// The fence of a device whose launches are over when they return.
#[derive(Debug)]
pub(crate) struct CompletedFence;

impl CopyFence for CompletedFence {
    fn wait(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
