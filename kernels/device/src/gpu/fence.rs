//! Fences: GPU events on which the host can wait from any thread, and dependencies between streams.

use std::sync::Arc;

use hip_runtime_sys::{DriverPtr, flag};

use super::device::GpuDevice;
use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use crate::pinned_memory::CopyFence;
use crate::{DeviceError, DeviceStream};

/// GPU event that completes after all work that was submitted to a stream before the event was recorded.
pub struct GpuFence {
    runtime: Arc<GpuRuntime>,
    event: DriverPtr,
}

// SAFETY: an event may be waited for on any thread; this value is the only user of the event.
unsafe impl Send for GpuFence {}

impl GpuFence {
    /// Records a fence that completes after all work submitted to `s` so far.
    pub fn record(runtime: &Arc<GpuRuntime>, s: &DeviceStream) -> Result<Self, GpuError> {
        runtime.not_capturing("recording a fence")?;
        Self::record_for_stream(runtime, s)
    }

    /// Records a fence on which another stream can wait. During graph capture, the fence becomes a dependency
    /// in the graph.
    fn record_for_stream(runtime: &Arc<GpuRuntime>, s: &DeviceStream) -> Result<Self, GpuError> {
        runtime.enter()?;
        let stream = runtime.stream(s)?;
        let free_event = runtime.events().pop();
        let event = match free_event {
            Some(event) => event,
            None => create(runtime)?,
        };
        let fence = Self { runtime: runtime.clone(), event };
        // SAFETY: event and stream belong to this device.
        let code = unsafe { (runtime.driver.event_record)(event, stream) };
        runtime.check(code, "event record")?;
        Ok(fence)
    }

    /// Makes later launches on `s` wait for this fence.
    pub fn block_stream(&self, s: &DeviceStream) -> Result<(), GpuError> {
        let stream = self.runtime.stream(s)?;
        // SAFETY: event and stream belong to this device.
        let code = unsafe { (self.runtime.driver.stream_wait)(stream, self.event, 0) };
        self.runtime.check(code, "stream wait")
    }

    /// Blocks the host until the fence has completed. May be called repeatedly.
    pub fn wait_event(&self) -> Result<(), GpuError> {
        self.runtime.enter()?;
        self.runtime.count_synchronization();
        // SAFETY: the event belongs to this device.
        let code = unsafe { (self.runtime.driver.event_synchronize)(self.event) };
        self.runtime.check(code, "event synchronize")
    }
}

fn create(runtime: &GpuRuntime) -> Result<DriverPtr, GpuError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: the output pointer is valid for writes.
    let code = unsafe { (runtime.driver.event_create)(&raw mut event, flag::EVENT_WITHOUT_TIME) };
    runtime.check(code, "event create")?;
    Ok(event)
}

impl GpuDevice {
    /// Implements `DeviceDriver::stream_wait`. The next launch on `s` does not overlap the previous launches
    /// on `s` and `other`: it starts after all of them have ended.
    pub fn wait_for_stream(&self, s: &DeviceStream, other: &DeviceStream) -> Result<(), GpuError> {
        let runtime = self.runtime();
        if runtime.is_dry_run() {
            return Ok(());
        }
        // The event can be reused immediately: the stream waits for the last record before the wait was
        // submitted, even if the event is recorded again later.
        GpuFence::record_for_stream(runtime, other)?.block_stream(s)?;
        runtime.set_stream_wait(s);
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
        // The event may be reused before it has completed, because earlier waits do not refer to later
        // records.
        self.runtime.events().push(self.event);
    }
}

impl std::fmt::Debug for GpuFence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuFence").finish_non_exhaustive()
    }
}
