//! Logits rows of a batch: selection, staging, and conversion of the sampled tokens to row outputs. A logits
//! row is the row of vocabulary logits computed for a sample position, a scored prompt position or a token
//! whose log-probability is pooled.
//!
//! A row that samples has a logits row for its last token and for each of its draft tokens. A row with prompt
//! log-probabilities has a logits row for each of its tokens. A draft token is accepted if it equals the
//! token sampled at its position, which is the token that would be sampled without drafts. The device decides
//! which draft tokens are accepted, and continues from the accepted tokens before the host receives them.
//! Logits are the largest result of a step, so they are computed in slices of bounded size.

use super::bitmasks::StepBitmasks;
use super::limits::StepLimits;
use crate::sequence_slots::{self, HostSequenceSlots, HostSequenceState, StagedEditRange};
use kernels::cpu::GREEDY_BELOW;
use ops::{SampledToken, SamplerOutputs, StagedLogitsRow, StagingBuffer, VocabParallelSupport};
use protocol::{
    Batch, BatchRow, PoolingMethod, RowError, RowInput, RowOutput, SamplingParams, Token,
    TokenLogprobs,
};

/// Maximum bytes of logits that are computed at once (a slice) on the CPU, where logits compete with other
/// data for the caches.
const CPU_SLICE_BYTES: usize = 64 << 20;
/// Maximum bytes of top log-probabilities in a slice.
const TOP_LOGPROBS_BYTES: usize = 64 << 20;

/// One row of logits, which is computed from one token of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogitsRow {
    /// Index of the batch row that contains the token.
    batch_row: usize,
    /// Index of the token among all tokens of the step. The logits are computed from its hidden state.
    token: u32,
    /// Position of the sampled token if no draft token of the earlier steps in flight is accepted. Each
    /// accepted draft token increases the position by one.
    min_position: u32,
    /// The token at `min_position` if it is already known: a prompt token whose log-probability was
    /// requested.
    known_token: Option<Token>,
    /// Number of draft tokens of the row before this position. The sampled token is valid only if all of
    /// these draft tokens are accepted.
    draft_index: u8,
    /// Whether the batch row has a draft token for this position, with which the sampled token is compared.
    /// The draft token is the next token of the step.
    has_draft: bool,
    /// Number of top log-probabilities to report; `None` = no log-probabilities are reported.
    top_logprobs: Option<u32>,
    /// Whether the log-probability of `known_token` is a result of the request's pooling method.
    is_pooled: bool,
}

/// Maximum bytes of logits that are computed at once (a slice) on a GPU. All logits of the largest decode
/// step must fit in one slice.
const GPU_SLICE_BYTES: usize = 512 << 20;

/// Maximum number of logits rows in a slice. Each row has `vocab` logits and `top` top log-probabilities.
pub(crate) fn logits_rows_per_slice(vocab: usize, top: usize, gpu: bool) -> usize {
    let bytes = if gpu { GPU_SLICE_BYTES } else { CPU_SLICE_BYTES };
    let logits = bytes / (vocab * size_of::<f32>()).max(1);
    let top_rows = TOP_LOGPROBS_BYTES / (top * (size_of::<f32>() + size_of::<Token>())).max(1);
    logits.min(top_rows).max(1)
}

/// Collects all logits rows of a batch: first sample positions in row order, then the positions at which the
/// log-probability of a known token is computed. At most `top_max` top log-probabilities are reported per
/// token.
pub(crate) fn collect_logits_rows(
    batch: &Batch,
    slots: &HostSequenceSlots,
    top_max: usize,
    found: &mut Vec<LogitsRow>,
) {
    found.clear();
    let limit = |top: Option<u32>| top.map(|top| top.min(top_max as u32));
    let mut first = 0;
    for (r, row) in batch.rows.iter().enumerate() {
        let state = slots.get(row.seq_slot);
        if row.samples {
            let top = limit(state.sampling.logprobs);
            let (token, min_position) = (first + row.len - 1, row.start + row.len);
            let drafts = state.drafts();
            found.extend((0..=drafts).map(|i| {
                let (token, min_position, draft_index, has_draft) =
                    (token + i, min_position + i, i as u8, i < drafts);
                LogitsRow {
                    batch_row: r,
                    token,
                    min_position,
                    known_token: None,
                    draft_index,
                    has_draft,
                    top_logprobs: top,
                    is_pooled: false,
                }
            }));
        }
        first += row.len + state.drafts();
    }
    first = 0;
    for (r, row) in batch.rows.iter().enumerate() {
        let state = slots.get(row.seq_slot);
        if let Some(top) = limit(state.sampling.prompt_logprobs) {
            found.extend(prompt_logprob_rows(r, row, first, state, top));
        }
        if let Some(PoolingMethod::TokenLogprobs(ids)) = &state.sampling.pooling
            && row.start + row.len == state.prompt_len
        {
            found.extend(ids.iter().map(|&id| pooled_logits_row(r, row, first, id)));
        }
        first += row.len + state.drafts();
    }
}

/// Returns the logits rows that give the log-probabilities of the prompt tokens from position `start + 1` on:
/// one logits row for each token of the row that is followed by a prompt token.
fn prompt_logprob_rows<'a>(
    r: usize,
    row: &'a BatchRow,
    first: u32,
    state: &HostSequenceState,
    top: u32,
) -> impl Iterator<Item = LogitsRow> + 'a {
    let ids = match &row.input {
        RowInput::Tokens(ids) => &ids[..],
        RowInput::SampledAt { .. } => &[], // Output tokens are never scored.
    };
    let successors = ids.iter().skip(1).copied().chain(row.next_token);
    let in_prompt = state.prompt_len.saturating_sub(row.start + 1) as usize;
    let logits_row = move |(i, known_token): (u32, Token)| {
        let (token, min_position) = (first + i, row.start + i + 1);
        let (draft_index, has_draft, known_token, top) = (0, false, Some(known_token), Some(top));
        LogitsRow {
            batch_row: r,
            token,
            min_position,
            known_token,
            draft_index,
            has_draft,
            top_logprobs: top,
            is_pooled: false,
        }
    };
    (0..).zip(successors.take(in_prompt)).map(logits_row)
}

/// Returns the logits row that gives the log-probability of `id` as the token after the last token of the
/// row.
fn pooled_logits_row(r: usize, row: &BatchRow, first: u32, id: Token) -> LogitsRow {
    LogitsRow {
        batch_row: r,
        token: first + row.len - 1,
        min_position: row.start + row.len,
        known_token: Some(id),
        draft_index: 0,
        has_draft: false,
        top_logprobs: Some(0),
        is_pooled: true,
    }
}

/// Writes the inputs of a slice of logits rows to the staging buffer, with their logit edits and grammar
/// bitmasks.
pub(crate) fn stage_logits_rows(
    slice: &[LogitsRow],
    batch: &Batch,
    slots: &HostSequenceSlots,
    masks: &StepBitmasks,
    vocab: usize,
    stage: &mut StagingBuffer,
) {
    for row in slice {
        let seq_slot = batch.rows[row.batch_row].seq_slot;
        let state = slots.get(seq_slot);
        let bitmask =
            masks.at(row.batch_row, row.draft_index).filter(|_| row.known_token.is_none());
        let (mask_at, mask_words) = match bitmask {
            Some(bitmask) => (
                sequence_slots::stage_bitmask(&state.sampling, bitmask, vocab, stage),
                sequence_slots::bitmask_words(vocab) as i32,
            ),
            None => (0, 0),
        };
        let edits = match row.known_token {
            None => state.stage_edits(row.min_position, stage),
            Some(_) => StagedEditRange::default(),
        };
        stage.logits_rows.push(StagedLogitsRow {
            token: row.token as i32,
            seq_slot: seq_slot.0 as i32,
            draft_index: row.draft_index.into(),
            has_draft: row.has_draft.into(),
            known_token: row.known_token.map_or(-1, |id| id as i32),
            top: row.top_logprobs.map_or(-1, |top| top as i32),
            edits_at: edits.first,
            edits: edits.count,
            mask_at,
            mask_words,
        });
    }
}

/// Whether any logits row needs a sampling method that the device does not support on vocab-parallel logits.
pub(crate) fn needs_full_logits(
    logits_rows: &[LogitsRow],
    batch: &Batch,
    slots: &HostSequenceSlots,
    vocab: usize,
    support: VocabParallelSupport,
) -> bool {
    let max_top_k = match support {
        VocabParallelSupport::AllRules => return false,
        VocabParallelSupport::Unsupported => return true,
        VocabParallelSupport::TopK(max_top_k) => max_top_k,
    };
    logits_rows.iter().any(|row| {
        let sampling = &slots.get(batch.rows[row.batch_row].seq_slot).sampling;
        row.known_token.is_some()
            || row.top_logprobs.is_some()
            || !fits_vocab_parallel(sampling, vocab, max_top_k)
    })
}

/// Whether vocab-parallel sampling supports these parameters: the sampling is greedy, random over all ids
/// (Gumbel-max), or limited to at most `max_top_k` ids.
fn fits_vocab_parallel(sampling: &SamplingParams, vocab: usize, max_top_k: usize) -> bool {
    let top_k = sampling.top_k as usize;
    if sampling.temperature < GREEDY_BELOW {
        true
    } else if (1..vocab).contains(&top_k) {
        top_k <= max_top_k
    } else {
        sampling.top_p >= 1.0 && sampling.min_p <= 0.0
    }
}

/// Removes logits rows of rows that are sampled under a grammar: all sample positions of a row whose first
/// bitmask is overdue, otherwise the sample positions after the row's last bitmask. A draft token at the last
/// position with a bitmask is not verified.
pub(crate) fn limit_to_bitmasks(logits_rows: &mut Vec<LogitsRow>, masks: &StepBitmasks) {
    logits_rows.retain_mut(|row| match masks.count(row.batch_row) {
        Some(count) if row.known_token.is_none() => {
            row.has_draft &= usize::from(row.draft_index) + 1 < count;
            usize::from(row.draft_index) < count
        }
        _ => true,
    });
}

/// Whether any logits row reports top log-probabilities.
pub(crate) fn needs_top_logprobs(slice: &[LogitsRow]) -> bool {
    slice.iter().any(|row| row.top_logprobs.is_some_and(|top| top > 0))
}

/// Writes the sampled tokens of a slice to the outputs of the batch rows.
pub(crate) fn write_outputs(slice: &[LogitsRow], outputs: &SamplerOutputs, rows: &mut [RowOutput]) {
    for (q, (logits_row, sampled)) in slice.iter().zip(outputs.iter()).enumerate() {
        let output = &mut rows[logits_row.batch_row];
        let is_valid =
            logits_row.known_token.is_some() || logits_row.draft_index == output.accepted;
        if output.error.is_some() || !is_valid {
            continue; // Tokens sampled after a rejected draft token are not valid.
        }
        match error_of(&sampled) {
            // The tokens before the sampling error are emitted, as they would be without draft tokens; the
            // next step reports the error.
            Some(_) if output.accepted > 0 && logits_row.known_token.is_none() => {
                output.accepted -= 1;
            }
            Some(error) => *output = RowOutput { error: Some(error), ..RowOutput::default() },
            None => write_output(logits_row, q, &sampled, outputs, output),
        }
    }
}

fn error_of(sampled: &SampledToken) -> Option<RowError> {
    match sampled.status {
        ops::SAMPLE_OK | ops::SAMPLE_DRAFT_ACCEPTED => None,
        ops::SAMPLE_ALL_MASKED => Some(RowError::AllMasked),
        _ => Some(RowError::NonFiniteLogits),
    }
}

fn write_output(
    logits_row: &LogitsRow,
    q: usize,
    sampled: &SampledToken,
    outputs: &SamplerOutputs,
    output: &mut RowOutput,
) {
    if logits_row.is_pooled {
        output.prompt_mut().pooled.push(sampled.logprob);
        return;
    }
    let (token, accepted) = (sampled.token as Token, sampled.status == ops::SAMPLE_DRAFT_ACCEPTED);
    let logprobs = logits_row.top_logprobs.map(|top| TokenLogprobs {
        token,
        logprob: sampled.logprob,
        rank: sampled.rank,
        top_logprobs: outputs.top(q, top as usize).collect(),
    });
    if logits_row.known_token.is_some() {
        output.prompt_mut().logprobs.extend(logprobs);
    } else {
        output.sampled_tokens.push(token);
        output.accepted += u8::from(accepted);
        output.logprobs.extend(logprobs);
    }
}

/// Maximum bytes of a step's inputs, with `words` 32-bit words of token ids, block tables and bitmasks.
pub(crate) fn stage_bytes(limits: &StepLimits, logits_rows: usize, words: usize) -> usize {
    let row = size_of::<ops::StagedStepRow>()
        + (limits.groups - 1) * size_of::<ops::StagedTableChange>()
        + ops::RowMetadataField::COUNT * size_of::<i32>();
    let records = limits.stage_rows() * row
        + limits.rows * (size_of::<ops::StagedSequenceInit>() + size_of::<ops::StagedDraftRow>())
        + logits_rows * size_of::<StagedLogitsRow>()
        + edits_max(limits) * size_of::<ops::StagedLogitEdit>();
    let regions = 9 * 64;
    size_of::<ops::StagingHeader>() + regions + records + words * size_of::<i32>()
}

/// Maximum number of changed logits (logit bias, bad words, stop ids) in the staging buffer. One request may
/// bias its whole vocabulary.
pub(crate) fn edits_max(limits: &StepLimits) -> usize {
    limits.vocab.max(1 << 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vocab_parallel_covers_small_cutoffs() {
        let random = SamplingParams { temperature: 0.7, ..SamplingParams::greedy() };
        let top_k = |top_k| SamplingParams { top_k, ..random.clone() };
        let found = |sampling: &SamplingParams| fits_vocab_parallel(sampling, 1000, 64);
        let with_cutoffs =
            |sampling: SamplingParams| SamplingParams { top_p: 0.9, min_p: 0.1, ..sampling };
        for sampling in [random.clone(), top_k(1), top_k(64), with_cutoffs(top_k(64)), top_k(1000)]
        {
            assert!(found(&sampling), "{sampling:?}");
        }
        let top_p = SamplingParams { top_p: 0.9, ..random.clone() };
        let min_p = SamplingParams { min_p: 0.1, ..random.clone() };
        for sampling in [top_p, min_p, top_k(65), with_cutoffs(top_k(1000))] {
            assert!(!found(&sampling), "{sampling:?}");
            assert!(found(&SamplingParams { temperature: 0.0, ..sampling }), "greedy sampling");
        }
    }
}
