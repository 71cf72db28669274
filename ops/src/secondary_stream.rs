//! Launches on a secondary stream, which overlap those of the step's main stream.

use std::sync::Arc;

use device::DeviceStream;

use crate::prefetch::LaunchOrder;
use crate::{OpError, Ops};

/// Ops on a secondary stream that overlaps the main stream of the [`Ops`] that made it; without a secondary
/// stream on the device, they are launched on the main stream.
///
/// They run after everything launched on the main stream before, and may read only memory that is not written
/// until they are joined.
#[derive(Debug)]
#[must_use = "results are undefined until the stream is joined"]
pub struct SecondaryStream {
    ops: Ops,
    /// `None`: launches go to the main stream.
    stream: Option<DeviceStream>,
}

impl SecondaryStream {
    /// Returns the ops that launch on the secondary stream. Read their results after
    /// [`SecondaryStream::join`] only.
    #[must_use]
    pub fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Makes later launches of `ops`, the main stream, wait for the secondary stream.
    pub fn join(self, ops: &Ops) -> Result<(), OpError> {
        let joined = |stream| ops.device.stream_wait(&ops.stream, &stream);
        Ok(self.stream.map_or(Ok(()), joined)?)
    }
}

impl Ops {
    /// Forks a secondary stream that waits for everything launched here so far.
    pub fn secondary_stream(&self) -> Result<SecondaryStream, OpError> {
        let stream = self.device.secondary_stream();
        if let Some(stream) = &stream {
            self.device.stream_wait(stream, &self.stream)?;
        }
        // Use a separate arena in either case, so that results have the same addresses when GPU timestamps
        // turn the stream off.
        let ops = Self {
            device: self.device.clone(),
            stream: stream.unwrap_or(self.stream),
            arena: Arc::clone(&self.secondary_arena),
            secondary_arena: Arc::clone(&self.secondary_arena),
            launch_order: LaunchOrder::default(),
            dtype: self.dtype,
        };
        Ok(SecondaryStream { ops, stream })
    }
}
