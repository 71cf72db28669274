//! Copies the token ids of a step to the host, for draft tokens that exist only on the device.

use device::{CopyInFlight, PinnedBuffer};

use crate::{OpError, Ops, StepBuffers};

/// Copy of the token ids of a step, with its pinned host memory.
#[derive(Debug)]
pub struct TokenIdDownload {
    /// Host memory; `None` while a copy is in flight.
    memory: Option<PinnedBuffer>,
    /// Copy in flight, and its number of ids.
    in_flight: Option<(CopyInFlight, usize)>,
}

impl TokenIdDownload {
    /// Allocates host memory for the token ids of any step.
    pub fn new(ops: &Ops, buffers: &StepBuffers) -> Result<Self, OpError> {
        let memory = ops.device.alloc_pinned(buffers.ids.len() * size_of::<u32>())?;
        Ok(Self { memory: Some(memory), in_flight: None })
    }

    /// Starts the copy of the first `tokens` ids of a step, in stream order. If an earlier copy is still in
    /// flight, waits for it first.
    pub fn start(
        &mut self,
        ops: &Ops,
        buffers: &StepBuffers,
        tokens: usize,
    ) -> Result<(), OpError> {
        self.wait()?;
        if let Some(memory) = self.memory.take() {
            let bytes = tokens * size_of::<u32>();
            let copy =
                ops.device.start_download(&ops.stream, buffers.ids.buffer(), memory, bytes)?;
            self.in_flight = Some((copy, tokens));
        }
        Ok(())
    }

    /// Waits for the copy in flight and returns the ids; none if no copy was started.
    pub fn wait(&mut self) -> Result<Vec<u32>, OpError> {
        let Some((copy, tokens)) = self.in_flight.take() else { return Ok(Vec::new()) };
        let memory = copy.wait()?;
        let words = memory.bytes().as_chunks::<4>().0[..tokens].iter();
        let ids = words.map(|&word| u32::from_ne_bytes(word)).collect();
        self.memory = Some(memory);
        Ok(ids)
    }
}
