//! Bitmasks over the vocabulary: the token ids that a request may sample.

use super::HostSequenceState;
use ops::{SequenceSamplingParams, StagedSequenceInit, StagingBuffer};
use protocol::{SamplingParams, SequenceSlot};

/// Number of 32-bit words of a bitmask over `vocab` ids.
fn bitmask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// Stages the bitmask for a slot's next token: the ids that both `mask` and the request's sampling parameters
/// allow.
pub(crate) fn stage_bitmask(
    seq_slot: SequenceSlot,
    state: &HostSequenceState,
    mask: &[u32],
    vocab: usize,
    stage: &mut StagingBuffer,
) {
    let allowed = allowed_mask(&state.sampling, vocab);
    let word = |i: usize| {
        let allowed = allowed.as_ref().map_or(u32::MAX, |allowed| allowed[i]);
        (mask.get(i).copied().unwrap_or(0) & allowed) as i32
    };
    let mask_at = stage.push_words((0..bitmask_words(vocab)).map(word));
    let params =
        SequenceSamplingParams { flags: state.params.flags | ops::RULE_MASKED, ..state.params };
    let seq_slot = seq_slot.0 as i32;
    stage.inits.push(StagedSequenceInit {
        seq_slot,
        mask_at,
        params,
        ..StagedSequenceInit::default()
    });
}

/// Stages the allowed token ids of a request. Returns the index of their bitmask among the staged words, or
/// -1 if all ids are allowed.
pub(super) fn stage_allowed_mask(
    sampling: &SamplingParams,
    vocab: usize,
    stage: &mut StagingBuffer,
) -> i32 {
    let allowed = allowed_mask(sampling, vocab);
    allowed.map_or(-1, |mask| stage.push_words(mask.into_iter().map(|word| word as i32)))
}

/// Returns the allowed token ids of a request as a bitmask; `None` = all ids are allowed.
fn allowed_mask(sampling: &SamplingParams, vocab: usize) -> Option<Vec<u32>> {
    let allowed = sampling.allowed_token_ids.as_ref()?;
    let mut mask = vec![0u32; bitmask_words(vocab)];
    for &id in allowed.iter().filter(|&&id| (id as usize) < vocab) {
        mask[id as usize / 32] |= 1 << (id % 32);
    }
    Some(mask)
}
