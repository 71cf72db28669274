//! Capture of launches into a CUDA graph or HIP graph, and replay of the graph.

use std::sync::Arc;

use hip_runtime_sys::{DriverPtr, flag};

use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use crate::device_driver::ReplayableGraph;
use crate::{DeviceError, DeviceStream};

/// Instantiated GPU graph that can be replayed.
pub(super) struct GpuGraph {
    runtime: Arc<GpuRuntime>,
    executable: DriverPtr,
}

// SAFETY: a graph may be launched from any thread, one thread at a time; this value is its only user.
unsafe impl Send for GpuGraph {}

/// Begins to capture launches on `s` into a graph.
pub(super) fn begin(runtime: &GpuRuntime, s: &DeviceStream) -> Result<(), GpuError> {
    runtime.not_capturing("beginning a capture")?;
    runtime.enter()?;
    let stream = runtime.stream(s)?;
    // SAFETY: the stream belongs to this device and is not capturing.
    let code = unsafe { (runtime.driver.capture_begin)(stream, flag::CAPTURE_THREAD_LOCAL) };
    runtime.check(code, "begin capture")?;
    runtime.set_capturing(true);
    Ok(())
}

/// Ends the capture, and instantiates the graph of all launches since `begin`.
pub(super) fn end(runtime: &Arc<GpuRuntime>, s: &DeviceStream) -> Result<GpuGraph, GpuError> {
    runtime.enter()?;
    let stream = runtime.stream(s)?;
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream belongs to this device, and the output pointer is valid for writes.
    let code = unsafe { (runtime.driver.capture_end)(stream, &raw mut graph) };
    // The driver has ended the capture, even if it returned an error.
    runtime.set_capturing(false);
    runtime.free_dropped();
    runtime.check(code, "end capture")?;
    let mut executable = std::ptr::null_mut();
    // SAFETY: the graph was captured above, and the output pointer is valid for writes.
    let code = unsafe { (runtime.driver.graph_instantiate)(&raw mut executable, graph, 0) };
    // SAFETY: the executable graph does not reference the captured graph.
    unsafe { (runtime.driver.graph_destroy)(graph) };
    runtime.check(code, "instantiate graph")?;
    Ok(GpuGraph { runtime: runtime.clone(), executable })
}

impl ReplayableGraph for GpuGraph {
    fn replay(&self, s: &DeviceStream) -> Result<(), DeviceError> {
        self.runtime.enter()?;
        let stream = self.runtime.stream(s)?;
        // SAFETY: the instantiated graph belongs to this device; all memory it accesses is still allocated,
        // as `DeviceDriver::replay` requires.
        let code = unsafe { (self.runtime.driver.graph_launch)(self.executable, stream) };
        Ok(self.runtime.check(code, "launch graph")?)
    }
}

impl Drop for GpuGraph {
    fn drop(&mut self) {
        if self.runtime.enter().is_ok() {
            // SAFETY: the graph was instantiated by `end` and is destroyed once; the driver defers
            // destruction until replays in flight have completed.
            unsafe { (self.runtime.driver.graph_executable_destroy)(self.executable) };
        }
    }
}

impl std::fmt::Debug for GpuGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuGraph").finish_non_exhaustive()
    }
}
