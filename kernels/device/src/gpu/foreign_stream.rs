//! Stream of a foreign host: an inference server in the same process, whose stream replaces stream 0 during a call.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use hip_runtime_sys::DriverPtr;

use super::device::GpuDevice;
use super::error::GpuError;

/// Handle of the foreign stream that replaces stream 0; none outside of the calls of a foreign host.
#[derive(Debug, Default)]
pub(super) struct ForeignStreamSlot {
    /// Whether `handle` is used. The null handle is a valid stream: the default stream of the driver.
    is_set: AtomicBool,
    handle: AtomicPtr<c_void>,
}

impl ForeignStreamSlot {
    /// Returns the handle of the foreign stream, if there is one.
    pub(super) fn get(&self) -> Option<DriverPtr> {
        self.is_set.load(Ordering::Acquire).then(|| self.handle.load(Ordering::Relaxed))
    }

    fn set(&self, handle: DriverPtr) {
        self.handle.store(handle, Ordering::Relaxed);
        self.is_set.store(true, Ordering::Release);
    }

    fn clear(&self) {
        self.is_set.store(false, Ordering::Release);
    }
}

/// Use of a foreign stream as stream 0 of a device, which ends when the guard is dropped.
#[derive(Debug)]
pub struct ForeignStreamGuard<'a> {
    device: &'a GpuDevice,
}

impl GpuDevice {
    /// Makes launches on stream 0 run on the stream `handle` (`cudaStream_t` or `hipStream_t`) of a foreign host. If the
    /// host captures the stream into a graph, calls that would invalidate the capture return [`GpuError::Capturing`].
    ///
    /// Errors: the driver rejects the handle, or the capture is already invalidated.
    ///
    /// # Safety
    /// `handle` is a stream of the primary context of this device that exists until the guard is dropped. No other
    /// thread uses stream 0 meanwhile, and launches on the streams of earlier guards are ordered before this call.
    pub unsafe fn enter_foreign_stream(
        &self,
        handle: u64,
    ) -> Result<ForeignStreamGuard<'_>, GpuError> {
        let (runtime, stream) = (self.runtime(), handle as DriverPtr);
        runtime.not_capturing("entering a foreign stream")?;
        runtime.enter()?;
        let mut status: c_int = 0;
        // SAFETY: the caller guarantees the stream, and the output pointer is valid for writes.
        let code = unsafe { (runtime.driver.capture_status)(stream, &raw mut status) };
        runtime.check(code, "capture status of a stream")?;
        match status {
            0 => runtime.free_dropped(),
            1 => runtime.set_capturing(true),
            _ => return Err(GpuError::CaptureInvalidated),
        }
        runtime.foreign_stream.set(stream);
        Ok(ForeignStreamGuard { device: self })
    }
}

impl Drop for ForeignStreamGuard<'_> {
    /// Memory that was dropped during a capture of the host is freed by the next call that is not captured, because the
    /// host may continue its capture.
    fn drop(&mut self) {
        let runtime = self.device.runtime();
        runtime.foreign_stream.clear();
        runtime.set_capturing(false);
    }
}
