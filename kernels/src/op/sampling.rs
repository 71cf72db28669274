//! Ops that sample tokens from logits, on whole rows or on vocabulary shards.

use device::MatRef;

use crate::step::{PreparedStep, SamplerOutputArrays, SequenceSlotArrays, StagingBufferView};
use crate::{AllGatherFn, VocabShard};

/// Samples a token for each logits row of a stage (the staged inputs of a step); further logits rows are
/// padding. A sampled token becomes the latest token of its sequence slot, and is appended to the token
/// history if a sampling rule reads the history. A draft token is accepted if it equals the sampled token, or
/// at random (synthetic acceptance). The result of a row depends on that row and its sequence slot alone.
#[derive(Debug)]
pub struct RowSampling<'a, 's, 'o> {
    /// Logits; f32 `[logits_rows, vocab_size]`.
    pub logits: MatRef<'a>,
    /// Staged inputs of the step.
    pub stage: &'a StagingBufferView<'a>,
    /// Token ids and positions of the step, and how its draft tokens are verified.
    pub prepared: &'a PreparedStep<'a>,
    /// State of the requests, in arrays indexed by sequence slot.
    pub slots: &'a mut SequenceSlotArrays<'s>,
    /// Output arrays: sampled tokens and log-probabilities.
    pub outputs: &'a mut SamplerOutputArrays<'o>,
}

/// [`RowSampling`] for a vocab-parallel LM head, where every rank has the logits of a vocabulary shard. All
/// ranks sample the same tokens, equal to those of `RowSampling` on whole rows; `gather` is called equally
/// often on each rank, with matrices of equal shapes.
/// [`KernelBackend::vocab_parallel_support`](crate::KernelBackend::vocab_parallel_support) gives the
/// supported rows.
///
/// Errors: [`DeviceError::PeerRanksFailed`](device::DeviceError::PeerRanksFailed) if `gather` fails.
pub struct VocabParallelSampling<'a, 's, 'o, 'g> {
    /// Logits of this shard; f32 `[logits_rows, shard.cols]`.
    pub logits: MatRef<'a>,
    /// Vocabulary shard of this rank: the token ids of the columns of `logits`.
    pub shard: &'a VocabShard,
    /// Staged inputs of the step.
    pub stage: &'a StagingBufferView<'a>,
    /// Token ids and positions of the step, and how its draft tokens are verified.
    pub prepared: &'a PreparedStep<'a>,
    /// State of the requests, in arrays indexed by sequence slot.
    pub slots: &'a mut SequenceSlotArrays<'s>,
    /// Output arrays: sampled tokens and log-probabilities.
    pub outputs: &'a mut SamplerOutputArrays<'o>,
    /// All-gather over the ranks of the vocab-parallel LM head.
    pub gather: &'a mut AllGatherFn<'g>,
}
