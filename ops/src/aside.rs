//! Launches that a device runs beside those of a step.

use crate::{OpError, Ops, PackedLinear};
use kernels::Stream;
use std::sync::Arc;

/// Launches beside those of the [`Ops`] that it comes from, where the device has room for two at once; else with them.
///
/// They come behind what was launched until it was made, and read only what stays as it is until they are joined.
#[derive(Debug)]
#[must_use = "what is not joined may never be ready"]
pub struct Aside {
    ops: Ops,
    /// `None`: the order is that of everything else.
    stream: Option<Stream>,
}

impl Aside {
    /// What launches there. Its results are to be read behind [`Aside::join`].
    #[must_use]
    pub fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Launches of `ops`, whom this is beside, come behind these from now on.
    pub fn join(self, ops: &Ops) -> Result<(), OpError> {
        let joined = |stream| ops.device.follow(&ops.stream, &stream);
        Ok(self.stream.map_or(Ok(()), joined)?)
    }
}

impl Ops {
    /// Whether an MLP of `tokens` rows that begins with `w` gains by being computed aside, with those of experts meanwhile.
    #[must_use]
    pub fn runs_beside(&self, tokens: usize, w: &PackedLinear) -> bool {
        self.device.runs_beside(tokens, &w.weight)
    }

    /// A place beside this one, behind all that has been launched here.
    pub fn aside(&self) -> Result<Aside, OpError> {
        let stream = self.device.side();
        if let Some(stream) = &stream {
            self.device.follow(stream, &self.stream)?;
        }
        // Memory of its own in either case: a step finds the same whether or not its launches are marked.
        let ops = Self {
            device: Arc::clone(&self.device),
            stream: stream.unwrap_or(self.stream),
            arena: Arc::clone(&self.side_arena),
            side_arena: Arc::clone(&self.side_arena),
            dtype: self.dtype,
        };
        Ok(Aside { ops, stream })
    }
}
