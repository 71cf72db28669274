//! The end of what was launched so far, for the host to wait on from any thread.

use std::sync::Arc;

use hip_runtime_sys::{DriverPtr, flag};

use super::device::GpuDevice;
use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use crate::{CopyFence, DeviceError, DeviceStream};

/// An event behind the launches of a stream.
pub struct GpuFence {
    runtime: Arc<GpuRuntime>,
    event: DriverPtr,
}

// SAFETY: an event may be waited for on any thread; this value is its only user.
unsafe impl Send for GpuFence {}

impl GpuFence {
    /// Passes when everything launched on `s` so far is over.
    pub fn record(runtime: &Arc<GpuRuntime>, s: &DeviceStream) -> Result<Self, GpuError> {
        runtime.not_capturing("recording a fence")?;
        Self::record_for_stream(runtime, s)
    }

    /// The same for another stream to wait for; in a capture that becomes part of the recording.
    fn record_for_stream(runtime: &Arc<GpuRuntime>, s: &DeviceStream) -> Result<Self, GpuError> {
        runtime.enter()?;
        let stream = runtime.stream(s)?;
        let resting = runtime.events().pop();
        let event = match resting {
            Some(event) => event,
            None => create(runtime)?,
        };
        let fence = Self { runtime: runtime.clone(), event };
        // SAFETY: an event and a stream of this device.
        let code = unsafe { (runtime.driver.event_record)(event, stream) };
        runtime.check(code, "event record")?;
        Ok(fence)
    }

    /// Launches on `s` from now on come after this fence.
    pub fn block_stream(&self, s: &DeviceStream) -> Result<(), GpuError> {
        let stream = self.runtime.stream(s)?;
        // SAFETY: an event and a stream of this device.
        let code = unsafe { (self.runtime.driver.stream_wait)(stream, self.event, 0) };
        self.runtime.check(code, "stream wait")
    }

    /// Waits, as often as wanted.
    pub fn wait_event(&self) -> Result<(), GpuError> {
        self.runtime.enter()?;
        // SAFETY: an event of this device.
        let code = unsafe { (self.runtime.driver.event_synchronize)(self.event) };
        self.runtime.check(code, "event synchronize")
    }
}

fn create(runtime: &GpuRuntime) -> Result<DriverPtr, GpuError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: a place to write to.
    let code = unsafe { (runtime.driver.event_create)(&raw mut event, flag::EVENT_WITHOUT_TIME) };
    runtime.check(code, "event create")?;
    Ok(event)
}

impl GpuDevice {
    /// As `Driver::follow`. The launch behind it waits for the whole of both predecessors.
    pub fn wait_for_stream(&self, s: &DeviceStream, other: &DeviceStream) -> Result<(), GpuError> {
        let runtime = self.runtime();
        if runtime.is_dry_run() {
            return Ok(());
        }
        // The event is free at once: whoever waits for a record goes on to do so when the event is recorded anew.
        GpuFence::record_for_stream(runtime, other)?.block_stream(s)?;
        runtime.mark_stream_wait(s);
        Ok(())
    }
}

impl CopyFence for GpuFence {
    fn wait(&mut self) -> Result<(), DeviceError> {
        Ok(self.wait_event()?)
    }
}

impl Drop for GpuFence {
    fn drop(&mut self) {
        // An event may be recorded again while it is pending: whoever waits then waits for the new record.
        self.runtime.events().push(self.event);
    }
}

impl std::fmt::Debug for GpuFence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuFence").finish_non_exhaustive()
    }
}
