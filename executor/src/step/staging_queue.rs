//! Staging memory: the inputs of a step on the host, and their copies to the device.

use super::STEPS_IN_FLIGHT;
use crate::ExecutorError;
use ops::{CopyInFlight, Ops, PinnedBuffer, StagingBuffer, StepBuffers};
use std::collections::VecDeque;

/// Staging buffer of the current step, and pinned host memory for the copies of `STEPS_IN_FLIGHT` steps to
/// the device.
pub(super) struct StagingQueue {
    pub(super) stage: StagingBuffer,
    /// Maximum number of words in the staging buffer.
    pub(super) words_max: usize,
    uploads: VecDeque<CopyInFlight>,
    free: Vec<PinnedBuffer>,
}

impl StagingQueue {
    pub(super) fn new(
        ops: &Ops,
        words_max: usize,
        stage_bytes: usize,
    ) -> Result<Self, ExecutorError> {
        let pinned = |_| ops.device().alloc_pinned(stage_bytes);
        let free = (0..STEPS_IN_FLIGHT).map(pinned).collect::<Result<_, _>>()?;
        Ok(Self { stage: StagingBuffer::default(), words_max, uploads: VecDeque::new(), free })
    }

    /// Starts the copy of the staging buffer to the device.
    pub(super) fn upload(
        &mut self,
        ops: &Ops,
        buffers: &mut StepBuffers,
    ) -> Result<(), ExecutorError> {
        let memory = match self.free.pop() {
            Some(memory) => memory,
            None => self.uploads.pop_front().expect("each buffer is free or in flight").wait()?,
        };
        self.uploads.push_back(buffers.upload(ops, &self.stage, memory)?);
        Ok(())
    }
}
