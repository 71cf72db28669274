//! Preparation of the inputs of a forward pass on the device, from the staged inputs of a step.

use crate::step::{SequenceSlotArrays, StagingBufferView, StepInputArrays};

/// Applies the updates in a stage to sequence slots and block tables, then computes the token ids, positions,
/// KV slots, context lengths and logits indices of the step. The layout of a stage is described in
/// [`crate::step`].
#[derive(Debug)]
pub struct StepPreparation<'a, 's, 't> {
    /// Staged inputs of the step.
    pub stage: &'a StagingBufferView<'a>,
    /// State of the requests, in arrays indexed by sequence slot.
    pub slots: &'a mut SequenceSlotArrays<'s>,
    /// Outputs: the input arrays of the forward pass.
    pub step: &'a mut StepInputArrays<'t>,
    /// Number of tokens per KV block.
    pub block_tokens: usize,
}
