//! Host CPU as a device: thread pool, memory and synchronous copies.

use std::sync::Arc;

use super::isa::CpuIsa;
use super::memory::{CpuAllocator, host_memory};
use super::thread_pool::ThreadPool;
use super::topology::physical_cores;
use crate::check::check_range;
use crate::pinned_memory::CompletedFence;
use crate::{
    Buffer, CopyInFlight, DeviceDriver, DeviceError, DeviceStream, DriverCallCounts, MemInfo,
    PinnedBuffer,
};

/// Configuration of a CPU device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuConfig {
    /// Number of compute threads, including the calling thread; 0 = one per physical core.
    pub threads: usize,
    /// Instruction set of the kernels. Tests may select an instruction set that is slower than the best
    /// available one.
    pub isa: CpuIsa,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { threads: 0, isa: CpuIsa::detect() }
    }
}

/// Host CPU as a device. All launches run synchronously.
#[derive(Debug)]
pub struct CpuDevice {
    threads: ThreadPool,
    memory: Arc<CpuAllocator>,
    isa: CpuIsa,
}

impl CpuDevice {
    /// Creates the device and starts its threads.
    ///
    /// Errors: the CPU does not support the instruction set, or a thread could not be started.
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        if !config.isa.available() {
            return Err(DeviceError::MissingIsa { isa: config.isa.name() });
        }
        let threads = if config.threads == 0 { physical_cores() } else { config.threads };
        Ok(Self { threads: ThreadPool::new(threads)?, memory: Arc::default(), isa: config.isa })
    }

    /// Returns the instruction set that the kernels use.
    #[must_use]
    pub fn isa(&self) -> CpuIsa {
        self.isa
    }

    /// Returns the thread pool, which may be used for other host work between kernels.
    #[must_use]
    pub fn threads(&self) -> &ThreadPool {
        &self.threads
    }
}

impl DeviceDriver for CpuDevice {
    fn name(&self) -> String {
        format!("cpu, {} threads, {}", self.threads.threads(), self.isa.name())
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.memory.alloc(bytes)
    }

    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        check_range("upload", offset, from.len(), to.bytes())?;
        // SAFETY: the range was checked, and `from` never overlaps a uniquely borrowed buffer.
        unsafe {
            to.as_mut_ptr().add(offset).copy_from_nonoverlapping(from.as_ptr(), from.len());
        }
        Ok(())
    }

    fn download(
        &self,
        _: &DeviceStream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError> {
        check_range("download", offset, to.len(), from.bytes())?;
        // SAFETY: the range was checked; buffers are initialised and `to` is uniquely borrowed.
        unsafe {
            to.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr().add(offset), to.len());
        }
        Ok(())
    }

    fn synchronize(&self, _: &DeviceStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DeviceError> {
        // SAFETY: the memory of this device is host memory.
        Ok(unsafe { PinnedBuffer::from_host(self.memory.alloc(bytes)?) })
    }

    fn start_upload(
        &self,
        _: &DeviceStream,
        to: &mut Buffer,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        check_range("start_upload", 0, bytes, from.bytes().len())?;
        self.upload(to, 0, &from.bytes()[..bytes])?;
        Ok(CopyInFlight::new(from, Box::new(CompletedFence)))
    }

    fn start_download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        mut to: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        check_range("start_download", 0, bytes, to.bytes().len())?;
        self.download(s, from, 0, &mut to.bytes_mut()[..bytes])?;
        Ok(CopyInFlight::new(to, Box::new(CompletedFence)))
    }

    fn zero(&self, _: &DeviceStream, x: &mut Buffer) -> Result<(), DeviceError> {
        // SAFETY: the range is the whole buffer, which is uniquely borrowed.
        unsafe { x.as_mut_ptr().write_bytes(0, x.bytes()) };
        Ok(())
    }

    fn driver_call_counts(&self) -> DriverCallCounts {
        DriverCallCounts { allocations: self.memory.allocations(), synchronizations: 0 }
    }

    fn mem_info(&self) -> MemInfo {
        let (free_bytes, total_bytes) = host_memory();
        MemInfo { free_bytes, total_bytes }
    }
}
