//! Launches recorded once and replayed.

use std::sync::Arc;

use hip_runtime_sys::{DriverPtr, flag};

use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use crate::{DeviceError, DeviceStream, GraphReplay};

/// A graph ready to run.
pub(super) struct GpuGraph {
    runtime: Arc<GpuRuntime>,
    executable: DriverPtr,
}

// SAFETY: a graph may be launched from any thread, one at a time; this value is its only user.
unsafe impl Send for GpuGraph {}

/// Launches on `s` are recorded from now on.
pub(super) fn begin(runtime: &GpuRuntime, s: &DeviceStream) -> Result<(), GpuError> {
    runtime.not_capturing("beginning a capture")?;
    runtime.enter()?;
    let stream = runtime.stream(s)?;
    // SAFETY: a stream of this device that is not capturing.
    let code = unsafe { (runtime.driver.capture_begin)(stream, flag::CAPTURE_THREAD_LOCAL) };
    runtime.check(code, "begin capture")?;
    runtime.set_capturing(true);
    Ok(())
}

/// What was recorded since `begin`.
pub(super) fn end(runtime: &Arc<GpuRuntime>, s: &DeviceStream) -> Result<GpuGraph, GpuError> {
    runtime.enter()?;
    let stream = runtime.stream(s)?;
    let mut graph = std::ptr::null_mut();
    // SAFETY: a stream of this device, and a place to write to.
    let code = unsafe { (runtime.driver.capture_end)(stream, &raw mut graph) };
    // Over, whether it succeeded or not.
    runtime.set_capturing(false);
    runtime.free_dropped();
    runtime.check(code, "end capture")?;
    let mut executable = std::ptr::null_mut();
    // SAFETY: a graph that was captured just now, and a place to write to.
    let code = unsafe { (runtime.driver.graph_instantiate)(&raw mut executable, graph, 0) };
    // SAFETY: the executable does not need it any more.
    unsafe { (runtime.driver.graph_destroy)(graph) };
    runtime.check(code, "instantiate graph")?;
    Ok(GpuGraph { runtime: runtime.clone(), executable })
}

impl GraphReplay for GpuGraph {
    fn replay(&self, s: &DeviceStream) -> Result<(), DeviceError> {
        self.runtime.enter()?;
        let stream = self.runtime.stream(s)?;
        // SAFETY: an executable of this device; what it touches is still allocated, as `Driver::replay` asks.
        let code = unsafe { (self.runtime.driver.graph_launch)(self.executable, stream) };
        Ok(self.runtime.check(code, "launch graph")?)
    }
}

impl Drop for GpuGraph {
    fn drop(&mut self) {
        if self.runtime.enter().is_ok() {
            // SAFETY: instantiated here, destroyed once; the driver waits for replays under way.
            unsafe { (self.runtime.driver.graph_executable_destroy)(self.executable) };
        }
    }
}

impl std::fmt::Debug for GpuGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HipGraph").finish_non_exhaustive()
    }
}
