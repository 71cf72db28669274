//! Timer for autotuning: measures launches with cold caches, as in a step of the model.

use std::sync::Arc;

use hip_runtime_sys::DriverPtr;

use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use super::memory;
use crate::{Buffer, DeviceStream};

/// Number of timed launches. The result is the mean of the faster half of the launches: other work on the
/// device can only make a launch slower, and a single launch is too short for the resolution of event
/// timestamps.
const TRIALS: usize = 8;

/// At most `1 / MAX_SWEEP_FRACTION` of the device memory is overwritten to evict the caches.
const MAX_SWEEP_FRACTION: u64 = 64;

/// Returns the number of bytes to overwrite in order to evict a cache of `cache_bytes` bytes, on a device
/// with `total_bytes` bytes of memory.
fn sweep_bytes(cache_bytes: u64, total_bytes: u64) -> u64 {
    (2 * cache_bytes).min(total_bytes / MAX_SWEEP_FRACTION)
}

/// Timer for launches on one stream; it records an event before and after each launch.
pub(super) struct AutotuneTimer<'a> {
    runtime: &'a GpuRuntime,
    stream: DriverPtr,
    events: Vec<DriverPtr>,
    /// Buffer that is overwritten before each launch to evict the caches. `None` if too little memory is free
    /// or the cache size is unknown; launches are then timed with warm caches.
    sweep: Option<Buffer>,
}

impl<'a> AutotuneTimer<'a> {
    /// Creates a timer for stream `s`. The stream must not be in graph capture.
    pub(super) fn new(runtime: &'a Arc<GpuRuntime>, s: &DeviceStream) -> Result<Self, GpuError> {
        let sweep =
            match sweep_bytes(runtime.properties.last_level_cache_bytes, runtime.mem_info().1) {
                0 => None,
                bytes => memory::alloc(runtime, bytes as usize).ok(),
            };
        let mut timer = Self { runtime, stream: runtime.stream(s)?, events: Vec::new(), sweep };
        for _ in 0..2 {
            let mut event = std::ptr::null_mut();
            // SAFETY: the output pointer is valid for writes.
            let code = unsafe { (runtime.driver.event_create)(&raw mut event, 0) };
            runtime.check(code, "event create")?;
            timer.events.push(event);
        }
        Ok(timer)
    }

    /// Returns the duration of `launch` in milliseconds. `launch` must use the stream of the timer.
    pub(super) fn time(
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
        // SAFETY: the range is a whole buffer that only this timer uses.
        self.runtime.check(unsafe { fill(memory.cast(), 0, bytes, self.stream) }, "fill")
    }

    fn record(&self, event: usize) -> Result<(), GpuError> {
        // SAFETY: event and stream belong to this device.
        let code = unsafe { (self.runtime.driver.event_record)(self.events[event], self.stream) };
        self.runtime.check(code, "event record")
    }

    fn elapsed(&self) -> Result<f32, GpuError> {
        let (driver, mut milliseconds) = (&self.runtime.driver, 0.0);
        // SAFETY: the event belongs to this device.
        let code = unsafe { (driver.event_synchronize)(self.events[1]) };
        self.runtime.check(code, "event synchronize")?;
        // SAFETY: the output pointer is valid for writes; both events have completed.
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
            // SAFETY: the event was created by this timer and has no waiters.
            unsafe { (self.runtime.driver.event_destroy)(*event) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_evicts_the_last_level_cache() {
        let (mi300x, h200) = (192 << 30, 141 << 30);
        assert_eq!(sweep_bytes(256 << 20, mi300x), 512 << 20);
        assert_eq!(sweep_bytes(60 << 20, h200), 120 << 20);
        assert_eq!(sweep_bytes(0, h200), 0);
        assert_eq!(sweep_bytes(256 << 20, 1 << 30), 16 << 20);
    }
}
