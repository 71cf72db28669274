//! Launches that a device runs beside those of a step.

use std::sync::Arc;

use device::DeviceStream;

use crate::prefetch::LaunchOrder;
use crate::{OpError, Ops};

/// Launches beside those of the [`Ops`] that it comes from, where the device has room for two at once; else with them.
///
/// They come behind what was launched until it was made, and read only what stays as it is until they are joined.
#[derive(Debug)]
#[must_use = "what is not joined may never be ready"]
pub struct SecondaryStream {
    ops: Ops,
    /// `None`: the order is that of everything else.
    stream: Option<DeviceStream>,
}

impl SecondaryStream {
    /// What launches there. Its results are to be read behind [`SecondaryStream::join`].
    #[must_use]
    pub fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Launches of `ops`, whom this is beside, come behind these from now on.
    pub fn join(self, ops: &Ops) -> Result<(), OpError> {
        let joined = |stream| ops.device.stream_wait(&ops.stream, &stream);
        Ok(self.stream.map_or(Ok(()), joined)?)
    }
}

impl Ops {
    /// A place beside this one, behind all that has been launched here.
    pub fn secondary_stream(&self) -> Result<SecondaryStream, OpError> {
        let stream = self.device.secondary_stream();
        if let Some(stream) = &stream {
            self.device.stream_wait(stream, &self.stream)?;
        }
        // Memory of its own in either case: a step finds the same whether or not its launches are marked.
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
