//! The end of what was launched so far, for the host to wait on from any thread.

use std::sync::Arc;

use hip_runtime_sys::{Ptr, flag};

use super::device::HipDevice;
use super::error::HipError;
use super::runtime::Runtime;
use crate::{DeviceError, Fence, Stream};

/// An event behind the launches of a stream.
pub(super) struct HipFence {
    runtime: Arc<Runtime>,
    event: Ptr,
}

// SAFETY: an event may be waited for on any thread; this value is its only user.
unsafe impl Send for HipFence {}

impl HipFence {
    /// Passes when everything launched on `s` so far is over.
    pub(super) fn record(runtime: &Arc<Runtime>, s: &Stream) -> Result<Self, HipError> {
        runtime.not_capturing("recording a fence")?;
        Self::behind(runtime, s)
    }

    /// The same for another stream to wait for; in a capture that becomes part of the recording.
    fn behind(runtime: &Arc<Runtime>, s: &Stream) -> Result<Self, HipError> {
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
    pub(super) fn hold_back(&self, s: &Stream) -> Result<(), HipError> {
        let stream = self.runtime.stream(s)?;
        // SAFETY: an event and a stream of this device.
        let code = unsafe { (self.runtime.driver.stream_wait)(stream, self.event, 0) };
        self.runtime.check(code, "stream wait")
    }

    /// Waits, as often as wanted.
    pub(super) fn pass(&self) -> Result<(), HipError> {
        self.runtime.enter()?;
        // SAFETY: an event of this device.
        let code = unsafe { (self.runtime.driver.event_synchronize)(self.event) };
        self.runtime.check(code, "event synchronize")
    }
}

fn create(runtime: &Runtime) -> Result<Ptr, HipError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: a place to write to.
    let code = unsafe { (runtime.driver.event_create)(&raw mut event, flag::EVENT_WITHOUT_TIME) };
    runtime.check(code, "event create")?;
    Ok(event)
}

impl HipDevice {
    /// As `Driver::follow`. The launch behind it waits for the whole of both predecessors.
    pub(super) fn launch_behind(&self, s: &Stream, other: &Stream) -> Result<(), HipError> {
        let runtime = self.runtime();
        if runtime.is_rehearsing() {
            return Ok(());
        }
        // The event is free at once: whoever waits for a record goes on to do so when the event is recorded anew.
        HipFence::behind(runtime, other)?.hold_back(s)?;
        runtime.follows(s);
        Ok(())
    }
}

impl Fence for HipFence {
    fn wait(&mut self) -> Result<(), DeviceError> {
        Ok(self.pass()?)
    }
}

impl Drop for HipFence {
    fn drop(&mut self) {
        // An event may be recorded again while it is pending: whoever waits then waits for the new record.
        self.runtime.events().push(self.event);
    }
}

impl std::fmt::Debug for HipFence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HipFence").finish_non_exhaustive()
    }
}
