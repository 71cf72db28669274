//! Bitmasks over the vocabulary: the token ids that a request may sample.

use ops::StagingBuffer;
use protocol::{SamplingParams, TokenBitmask};

/// Number of 32-bit words of a bitmask over `vocab` ids.
pub(crate) fn bitmask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// Writes the bitmask for one sample position to the staging buffer: the ids that both `bitmask` and the
/// request's sampling parameters allow. Returns the index of the bitmask's first word among the staged words.
pub(crate) fn stage_bitmask(
    sampling: &SamplingParams,
    bitmask: &TokenBitmask,
    vocab: usize,
    stage: &mut StagingBuffer,
) -> i32 {
    let allowed = allowed_mask(sampling, vocab);
    let word = |i: usize| {
        let allowed = allowed.as_ref().map_or(u32::MAX, |allowed| allowed[i]);
        (bitmask.words.get(i).copied().unwrap_or(0) & allowed) as i32
    };
    stage.push_words((0..bitmask_words(vocab)).map(word))
}

/// Writes the allowed token ids of a request to the staging buffer, as a bitmask. Returns the index of the
/// bitmask's first word among the staged words, or -1 if all ids are allowed.
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
