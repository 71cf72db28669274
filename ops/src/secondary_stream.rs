//! Ops on a secondary stream, which overlap with ops on the main stream of the step.

use std::sync::Arc;

use device::DeviceStream;

use crate::prefetch::FusedLaunchTracker;
use crate::{OpError, Ops};

/// Ops on a secondary stream that overlaps the main stream of the [`Ops`] that forked it. If the device has
/// no secondary stream, the ops are launched on the main stream.
///
/// The ops run after everything that was launched on the main stream before the fork. Until the join, they
/// may read only memory that is not written meanwhile.
#[derive(Debug)]
#[must_use = "results are undefined until the stream is joined"]
pub(crate) struct SecondaryStream {
    ops: Ops,
    /// Secondary stream that `join` waits for; `None` = ops are launched on the main stream.
    stream: Option<DeviceStream>,
}

impl SecondaryStream {
    /// Returns the ops that launch on the secondary stream. Read their results after
    /// [`SecondaryStream::join`] only.
    pub(crate) fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Makes later launches on the main stream, that of `ops`, wait for the secondary stream.
    pub(crate) fn join(self, ops: &Ops) -> Result<(), OpError> {
        let joined = |stream| ops.device.stream_wait(&ops.stream, &stream);
        Ok(self.stream.map_or(Ok(()), joined)?)
    }
}

impl Ops {
    /// Forks a secondary stream that waits for everything launched on this stream so far.
    pub(crate) fn secondary_stream(&self) -> Result<SecondaryStream, OpError> {
        let stream = self.device.secondary_stream();
        if let Some(stream) = &stream {
            self.device.stream_wait(stream, &self.stream)?;
        }
        // Use a separate arena even without a secondary stream, so that results have the same addresses when
        // GPU timestamps turn the stream off.
        let ops = Self {
            device: self.device.clone(),
            stream: stream.unwrap_or(self.stream),
            arena: Arc::clone(&self.secondary_arena),
            secondary_arena: Arc::clone(&self.secondary_arena),
            launch_order: FusedLaunchTracker::default(),
            dtype: self.dtype,
        };
        Ok(SecondaryStream { ops, stream })
    }
}
