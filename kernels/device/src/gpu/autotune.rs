//! How long launches take where a step meets them: with nothing of what they read in the caches.

use std::sync::Arc;

use hip_runtime_sys::DriverPtr;

use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use super::memory;
use crate::{Buffer, DeviceStream};

/// Launches, of which the faster half counts: whatever else the device does only makes them longer, and
/// its clock is too coarse for the fastest alone.
const TRIALS: usize = 8;

/// Two events around launches of one stream.
pub struct AutotuneTimer<'a> {
    runtime: &'a GpuRuntime,
    stream: DriverPtr,
    events: Vec<DriverPtr>,
    /// Twice the cache; none where memory is short, and launches are timed as they come.
    sweep: Option<Buffer>,
}

impl<'a> AutotuneTimer<'a> {
    /// On `s`, which must not be captured.
    pub fn new(runtime: &'a Arc<GpuRuntime>, s: &DeviceStream) -> Result<Self, GpuError> {
        let sweep = match runtime.properties.l2_bytes as usize {
            0 => None,
            bytes => memory::alloc(runtime, 2 * bytes).ok(),
        };
        let mut trial = Self { runtime, stream: runtime.stream(s)?, events: Vec::new(), sweep };
        for _ in 0..2 {
            let mut event = std::ptr::null_mut();
            // SAFETY: a place to write to.
            let code = unsafe { (runtime.driver.event_create)(&raw mut event, 0) };
            runtime.check(code, "event create")?;
            trial.events.push(event);
        }
        Ok(trial)
    }

    /// Milliseconds of `launch`, which launches on this trial's stream.
    pub fn time(
        &mut self,
        mut launch: impl FnMut() -> Result<(), GpuError>,
    ) -> Result<f32, GpuError> {
        let mut times = [0.0; TRIALS];
        for time in &mut times {
            self.sweep_caches()?;
            self.record(0)?;
            launch()?;
            self.record(1)?;
            *time = self.elapsed()?;
        }
        times.sort_unstable_by(f32::total_cmp);
        Ok(times[..TRIALS / 2].iter().sum::<f32>() / (TRIALS / 2) as f32)
    }

    fn sweep_caches(&mut self) -> Result<(), GpuError> {
        let Some(sweep) = &mut self.sweep else { return Ok(()) };
        let (bytes, memory) = (sweep.bytes(), sweep.as_mut_ptr());
        let fill = self.runtime.driver.fill;
        // SAFETY: all of a buffer that only this trial knows.
        self.runtime.check(unsafe { fill(memory.cast(), 0, bytes, self.stream) }, "fill")
    }

    fn record(&self, event: usize) -> Result<(), GpuError> {
        // SAFETY: an event and a stream of this device.
        let code = unsafe { (self.runtime.driver.event_record)(self.events[event], self.stream) };
        self.runtime.check(code, "event record")
    }

    fn elapsed(&self) -> Result<f32, GpuError> {
        let (driver, mut milliseconds) = (&self.runtime.driver, 0.0);
        // SAFETY: an event of this device.
        let code = unsafe { (driver.event_synchronize)(self.events[1]) };
        self.runtime.check(code, "event synchronize")?;
        // SAFETY: a place to write to; both events have passed.
        let code = unsafe {
            (driver.event_elapsed)(&raw mut milliseconds, self.events[0], self.events[1])
        };
        self.runtime.check(code, "event elapsed")?;
        Ok(milliseconds)
    }
}

impl Drop for AutotuneTimer<'_> {
    fn drop(&mut self) {
        for event in &self.events {
            // SAFETY: made by this trial; nobody waits for it.
            unsafe { (self.runtime.driver.event_destroy)(*event) };
        }
    }
}
