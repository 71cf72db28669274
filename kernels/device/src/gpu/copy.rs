//! Synchronous and asynchronous copies between host and GPU memory.

use super::device::GpuDevice;
use super::fence::GpuFence;
use crate::check::check_range;
use crate::{Buffer, CopyInFlight, DeviceError, DeviceStream, PinnedBuffer};

impl GpuDevice {
    /// Copies host bytes to a buffer on the first stream, after all previous launches on this stream. Blocks
    /// until the copy has completed.
    pub fn copy_in(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        check_range("upload", offset, from.len(), to.bytes())?;
        let (runtime, s) = (self.runtime(), DeviceStream::default());
        runtime.not_capturing("upload")?;
        runtime.enter()?;
        let stream = runtime.stream(&s)?;
        // SAFETY: the range was checked, and the copy has completed before the borrow of `from` ends.
        let code = unsafe {
            let at = to.as_mut_ptr().add(offset).cast();
            (runtime.driver.copy_to_device)(at, from.as_ptr().cast(), from.len(), stream)
        };
        let copied = runtime.check(code, "copy to device");
        runtime.synchronize(&s)?;
        Ok(copied?)
    }

    /// Copies a part of a buffer to the host, after all previous launches on `s`. Blocks until the copy has
    /// completed.
    pub fn copy_out(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError> {
        check_range("download", offset, to.len(), from.bytes())?;
        let runtime = self.runtime();
        runtime.not_capturing("download")?;
        runtime.enter()?;
        let stream = runtime.stream(s)?;
        // SAFETY: the range was checked, and the copy has completed before the borrow of `to` ends.
        let code = unsafe {
            let at = from.as_ptr().cast_mut().add(offset).cast();
            (runtime.driver.copy_to_host)(to.as_mut_ptr().cast(), at, to.len(), stream)
        };
        let copied = runtime.check(code, "copy to host");
        runtime.synchronize(s)?;
        Ok(copied?)
    }

    /// Starts an asynchronous copy from pinned host memory to the device on `s`. `CopyInFlight::wait` returns
    /// the pinned buffer after the copy has completed.
    pub fn begin_copy_in(
        &self,
        s: &DeviceStream,
        to: &mut Buffer,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        check_range("start_upload", 0, bytes, from.bytes().len())?;
        check_range("start_upload", 0, bytes, to.bytes())?;
        let runtime = self.runtime();
        runtime.not_capturing("start_upload")?;
        runtime.enter()?;
        let stream = runtime.stream(s)?;
        // SAFETY: both ranges were checked; `from` is kept until the fence after the copy has completed.
        let code = unsafe {
            let source = from.bytes().as_ptr().cast();
            (runtime.driver.copy_to_device)(to.as_mut_ptr().cast(), source, bytes, stream)
        };
        runtime.check(code, "copy to device")?;
        self.in_flight(s, from)
    }

    /// Starts an asynchronous copy from the device to pinned host memory on `s`. `CopyInFlight::wait` returns
    /// the pinned buffer after the copy has completed.
    pub fn begin_copy_out(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        mut to: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        check_range("start_download", 0, bytes, to.bytes().len())?;
        check_range("start_download", 0, bytes, from.bytes())?;
        let runtime = self.runtime();
        runtime.not_capturing("start_download")?;
        runtime.enter()?;
        let stream = runtime.stream(s)?;
        // SAFETY: both ranges were checked; `to` is kept until the fence after the copy has completed.
        let code = unsafe {
            let source = from.as_ptr().cast_mut().cast();
            let target = to.bytes_mut().as_mut_ptr().cast();
            (runtime.driver.copy_to_host)(target, source, bytes, stream)
        };
        runtime.check(code, "copy to host")?;
        self.in_flight(s, to)
    }

    /// Fills the whole buffer `x` with zeros, asynchronously on `s`.
    pub fn fill_with_zeros(&self, s: &DeviceStream, x: &mut Buffer) -> Result<(), DeviceError> {
        let runtime = self.runtime();
        runtime.enter()?;
        let (to, bytes) = (x.as_mut_ptr().cast(), x.bytes());
        // SAFETY: the range is the whole buffer, which is uniquely borrowed.
        let code = unsafe { (runtime.driver.fill)(to, 0, bytes, runtime.stream(s)?) };
        Ok(runtime.check(code, "fill")?)
    }

    /// Records a fence after the last copy on `s`, and returns a `CopyInFlight` that owns `memory` until the
    /// copy has completed.
    fn in_flight(
        &self,
        s: &DeviceStream,
        memory: PinnedBuffer,
    ) -> Result<CopyInFlight, DeviceError> {
        match GpuFence::record(self.runtime(), s) {
            Ok(fence) => Ok(CopyInFlight::new(memory, Box::new(fence))),
            Err(error) => {
                std::mem::forget(memory); // Leaked: without a fence, the end of the copy is unknown.
                Err(error.into())
            }
        }
    }
}
