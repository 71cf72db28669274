//! Sampling of tokens. Legend: n logits rows, V vocabulary.

use device::MatRef;

use crate::step::{PreparedStep, SamplerOutputArrays, SequenceSlotArrays, StageView};
use crate::{GatherFn, VocabShard};

/// Samples a token for each logits row of a stage; logits rows after those of the stage are padding. A
/// sampled token becomes the latest token of its sequence slot, and is appended to the history if a sampling
/// rule reads the history. Draft tokens are verified by comparison with the sampled tokens, or accepted at
/// random (synthetic acceptance). The result of a row depends on that row and its sequence slot alone.
#[derive(Debug)]
pub struct RowSampling<'a, 's, 'o> {
    /// f32 `[n, V]`
    pub logits: MatRef<'a>,
    /// Staged inputs of the step.
    pub stage: &'a StageView<'a>,
    /// Prepared inputs of the step.
    pub prepared: &'a PreparedStep<'a>,
    /// Arrays by sequence slot.
    pub slots: &'a mut SequenceSlotArrays<'s>,
    /// Sampled tokens and log-probabilities.
    pub outputs: &'a mut SamplerOutputArrays<'o>,
}

/// [`RowSampling`] where every rank has the logits of a vocabulary shard. All ranks sample the same tokens,
/// equal to those of `RowSampling` on whole rows; `gather` is called equally often on each rank, with
/// matrices of one shape.
/// [`KernelBackend::vocab_parallel_support`](crate::KernelBackend::vocab_parallel_support) gives the
/// supported rows.
///
/// Errors: [`DeviceError::PeerRanksFailed`](device::DeviceError::PeerRanksFailed) if `gather` fails.
pub struct VocabParallelSampling<'a, 's, 'o, 'g> {
    /// Logits of this shard; f32 `[n, shard.cols]`
    pub logits: MatRef<'a>,
    /// Vocabulary shard of this rank.
    pub shard: &'a VocabShard,
    /// Staged inputs of the step.
    pub stage: &'a StageView<'a>,
    /// Prepared inputs of the step.
    pub prepared: &'a PreparedStep<'a>,
    /// Arrays by sequence slot.
    pub slots: &'a mut SequenceSlotArrays<'s>,
    /// Sampled tokens and log-probabilities.
    pub outputs: &'a mut SamplerOutputArrays<'o>,
    /// All-gather of the ranks.
    pub gather: &'a mut GatherFn<'g>,
}
