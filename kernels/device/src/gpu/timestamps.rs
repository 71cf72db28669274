//! GPU event timestamps. They are recorded directly, or as nodes of captured graphs.

use std::sync::Arc;

use hip_runtime_sys::{DriverPtr, flag};

use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use crate::{DeviceError, DeviceStream, TimestampEvents};

/// Fixed number of GPU events that record timestamps.
pub(super) struct GpuTimestampEvents {
    runtime: Arc<GpuRuntime>,
    events: Vec<DriverPtr>,
}

// SAFETY: events may be recorded and read on any thread whose context is current; the drivers are
// thread-safe.
unsafe impl Send for GpuTimestampEvents {}
// SAFETY: events may be recorded and read on any thread whose context is current; the drivers are
// thread-safe.
unsafe impl Sync for GpuTimestampEvents {}

impl GpuTimestampEvents {
    pub(super) fn new(runtime: &Arc<GpuRuntime>, count: usize) -> Result<Self, GpuError> {
        runtime.not_capturing("creating events")?;
        runtime.enter()?;
        let mut timestamps = Self { runtime: runtime.clone(), events: Vec::with_capacity(count) };
        for _ in 0..count {
            let mut event = std::ptr::null_mut();
            // SAFETY: the output pointer is valid for writes.
            let code = unsafe { (runtime.driver.event_create)(&raw mut event, flag::EVENT_TIMED) };
            runtime.check(code, "event create")?;
            timestamps.events.push(event);
        }
        Ok(timestamps)
    }

    fn event(&self, i: usize) -> Result<DriverPtr, DeviceError> {
        let (kernel, what, index, limit) =
            ("event timestamp", "event timestamp", i as i64, self.events.len());
        self.events.get(i).copied().ok_or(DeviceError::Index { kernel, what, index, limit })
    }

    fn record(&self, s: &DeviceStream, event: DriverPtr) -> Result<(), GpuError> {
        let runtime = &self.runtime;
        runtime.enter()?;
        let stream = runtime.stream(s)?;
        let code = match (runtime.is_capturing(), runtime.driver.event_record_with) {
            // SAFETY: event and stream belong to this device.
            (false, _) => unsafe { (runtime.driver.event_record)(event, stream) },
            (true, Some(record)) => {
                // SAFETY: event and stream belong to this device; the owner of the event keeps it alive
                // longer than the captured graph.
                unsafe { record(event, stream, flag::EVENT_RECORD_EXTERNAL) }
            }
            (true, None) => return Err(GpuError::Capturing { call: "event record" }),
        };
        runtime.check(code, "event record")
    }
}

impl TimestampEvents for GpuTimestampEvents {
    fn len(&self) -> usize {
        self.events.len()
    }

    fn record(&self, s: &DeviceStream, i: usize) -> Result<(), DeviceError> {
        let event = self.event(i)?;
        if self.runtime.is_dry_run() {
            return Ok(());
        }
        Ok(self.record(s, event)?)
    }

    fn wait(&self, i: usize) -> Result<(), DeviceError> {
        let event = self.event(i)?;
        self.runtime.enter()?;
        // SAFETY: the event belongs to this device.
        let code = unsafe { (self.runtime.driver.event_synchronize)(event) };
        Ok(self.runtime.check(code, "event synchronize")?)
    }

    fn elapsed_ns(&self, from: usize, to: usize) -> Result<i64, DeviceError> {
        let (from, to) = (self.event(from)?, self.event(to)?);
        self.runtime.enter()?;
        let mut ms = 0.0_f32;
        // SAFETY: the output pointer is valid for writes, and both events record timestamps.
        let code = unsafe { (self.runtime.driver.event_elapsed)(&raw mut ms, from, to) };
        self.runtime.check(code, "event elapsed time")?;
        Ok((f64::from(ms) * 1e6) as i64)
    }
}

impl Drop for GpuTimestampEvents {
    fn drop(&mut self) {
        if self.runtime.enter().is_err() {
            return;
        }
        for event in std::mem::take(&mut self.events) {
            // SAFETY: the event was created by `new` and is destroyed once; captured graphs that contain the
            // event are not replayed any more.
            unsafe { (self.runtime.driver.event_destroy)(event) };
        }
    }
}

impl std::fmt::Debug for GpuTimestampEvents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuTimestampEvents")
            .field("events", &self.events.len())
            .finish_non_exhaustive()
    }
}

/// Recorder of per-kernel timestamps: records one event after each launch.
#[derive(Debug)]
pub struct KernelTimestamper {
    pub timestamps: Arc<dyn TimestampEvents>,
    pub next: usize,
    /// Name of the kernel that was launched before each recorded event.
    pub names: Vec<&'static str>,
}

impl KernelTimestamper {
    /// Records the next event after the launch of the kernel `name` on `s`. Does nothing if all events have
    /// been used.
    pub fn launched(&mut self, s: &DeviceStream, name: &'static str) -> Result<(), DeviceError> {
        if self.next >= self.timestamps.len() {
            return Ok(());
        }
        self.timestamps.record(s, self.next)?;
        self.next += 1;
        self.names.push(name);
        Ok(())
    }
}
