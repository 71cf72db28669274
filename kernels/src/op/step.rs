//! Preparation of the inputs of a step on the device.

use crate::step::{SequenceSlotArrays, StageView, StepArrays};

/// Applies the updates of a stage to sequence slots and block tables, then computes token ids, positions, KV
/// slots, context lengths and logits indices of the step. See [`crate::step`].
#[derive(Debug)]
pub struct StepPreparation<'a, 's, 't> {
    /// Staged inputs of the step.
    pub stage: &'a StageView<'a>,
    /// Arrays by sequence slot.
    pub slots: &'a mut SequenceSlotArrays<'s>,
    /// Arrays of the step.
    pub step: &'a mut StepArrays<'t>,
    /// Number of tokens of a KV block.
    pub block_tokens: usize,
}
