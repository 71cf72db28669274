//! Logits rows of a batch (sample positions and scored prompt positions), and their sampled tokens in the
//! output.
//!
//! A row that samples has a logits row for its last token and for each of its draft tokens; a row with prompt
//! log-probabilities has one for each of its tokens. A draft token is accepted if the token sampled at its
//! position, as it would be without drafts, is the same id: the device decides that, and continues from there
//! before the host receives the result. Logits are the largest result of a step, so they are computed in
//! slices of bounded size.

use super::bitmasks::StepBitmasks;
use super::limits::StepLimits;
use crate::sequence_slots::{self, HostSequenceSlots, HostSequenceState};
use kernels::cpu::GREEDY_BELOW;
use ops::{SampledToken, SamplerOutputs, StageLogitsRow, StagingBuffer, VocabParallelSupport};
use protocol::{
    Batch, BatchRow, RowError, RowInput, RowOutput, SamplingParams, Token, TokenLogprobs,
};

/// Bytes of a slice of logits on the CPU, where logits compete for its caches.
const CPU_SLICE_BYTES: usize = 64 << 20;
/// Bytes of top log-probabilities in a slice.
const TOP_LOGPROBS_BYTES: usize = 64 << 20;

/// A row of logits: of one token of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogitsRow {
    /// Row of the batch.
    row: usize,
    /// Token of the step whose hidden state is read.
    token: u32,
    /// Position of the sampled token if no draft token of steps in flight is accepted.
    min_position: u32,
    /// The token at that position, if known: a prompt position to be scored.
    known_token: Option<Token>,
    /// Number of preceding draft tokens of the row, all of which must be accepted.
    draft_index: u8,
    /// Whether the step's next token is the draft token for this position.
    has_draft: bool,
    /// Number of top log-probabilities to report; `None` = no log-probabilities.
    top_logprobs: Option<u32>,
}

/// Bytes of a slice of logits on a GPU, where a slice must hold the widest decode step.
const GPU_SLICE_BYTES: usize = 512 << 20;

/// Number of logits rows in a slice: each has `vocab` logits and `top` top log-probabilities.
pub(crate) fn logits_rows_per_slice(vocab: usize, top: usize, gpu: bool) -> usize {
    let bytes = if gpu { GPU_SLICE_BYTES } else { CPU_SLICE_BYTES };
    let logits = bytes / (vocab * size_of::<f32>()).max(1);
    let lists = TOP_LOGPROBS_BYTES / (top * (size_of::<f32>() + size_of::<Token>())).max(1);
    logits.min(lists).max(1)
}

/// Collects all logits rows of a batch: sample positions first, in row order, then prompt positions. The
/// number of top log-probabilities is limited to `top_max`.
pub(crate) fn collect_logits_rows(
    batch: &Batch,
    seats: &HostSequenceSlots,
    top_max: usize,
    found: &mut Vec<LogitsRow>,
) {
    found.clear();
    let cut = |top: Option<u32>| top.map(|top| top.min(top_max as u32));
    let mut first = 0;
    for (r, row) in batch.rows.iter().enumerate() {
        let seat = seats.get(row.seq_slot);
        if row.samples {
            let top = cut(seat.sampling.logprobs);
            let (token, least) = (first + row.len - 1, row.start + row.len);
            let drafts = seat.drafts();
            found.extend((0..=drafts).map(|i| {
                let (token, least, place, draft) = (token + i, least + i, i as u8, i < drafts);
                LogitsRow {
                    row: r,
                    token,
                    min_position: least,
                    known_token: None,
                    draft_index: place,
                    has_draft: draft,
                    top_logprobs: top,
                }
            }));
        }
        first += row.len + seat.drafts();
    }
    first = 0;
    for (r, row) in batch.rows.iter().enumerate() {
        let seat = seats.get(row.seq_slot);
        if let Some(top) = cut(seat.sampling.prompt_logprobs) {
            found.extend(prompt_logprob_rows(r, row, first, seat, top));
        }
        first += row.len + seat.drafts();
    }
}

/// Logits rows of the prompt positions `start + 1 ..` that the row's tokens predict.
fn prompt_logprob_rows<'a>(
    r: usize,
    row: &'a BatchRow,
    first: u32,
    seat: &HostSequenceState,
    top: u32,
) -> impl Iterator<Item = LogitsRow> + 'a {
    let ids = match &row.input {
        RowInput::Tokens(ids) => &ids[..],
        RowInput::SampledAt { .. } => &[], // Output tokens are never scored.
    };
    let successors = ids.iter().skip(1).copied().chain(row.next_token);
    let in_prompt = seat.prompt_len.saturating_sub(row.start + 1) as usize;
    let question = move |(i, known): (u32, Token)| {
        let (token, least) = (first + i, row.start + i + 1);
        let (place, draft, known, top) = (0, false, Some(known), Some(top));
        LogitsRow {
            row: r,
            token,
            min_position: least,
            known_token: known,
            draft_index: place,
            has_draft: draft,
            top_logprobs: top,
        }
    };
    (0..).zip(successors.take(in_prompt)).map(question)
}

/// Stages a slice of logits rows with the edits of their logits and the bitmasks of their rows.
pub(crate) fn stage_logits_rows(
    slice: &[LogitsRow],
    batch: &Batch,
    seats: &HostSequenceSlots,
    masks: &StepBitmasks,
    vocab: usize,
    stage: &mut StagingBuffer,
) {
    for question in slice {
        let seat = batch.rows[question.row].seq_slot;
        if let (None, Some(mask)) = (question.known_token, masks.of(question.row)) {
            sequence_slots::stage_bitmask(seat, seats.get(seat), mask, vocab, stage);
        }
        let (edits_at, edits) = match question.known_token {
            None => seats.get(seat).stage_edits(question.min_position, stage),
            Some(_) => (0, 0),
        };
        stage.logits_rows.push(StageLogitsRow {
            token: question.token as i32,
            seq_slot: seat.0 as i32,
            draft_index: question.draft_index.into(),
            has_draft: question.has_draft.into(),
            known_token: question.known_token.map_or(-1, |id| id as i32),
            top: question.top_logprobs.map_or(-1, |top| top as i32),
            edits_at,
            edits,
        });
    }
}

/// Whether any logits row needs sampling that the device does not support on vocab-parallel logits.
pub(crate) fn needs_full_logits(
    questions: &[LogitsRow],
    batch: &Batch,
    seats: &HostSequenceSlots,
    vocab: usize,
    answered: VocabParallelSupport,
) -> bool {
    let most = match answered {
        VocabParallelSupport::AllRules => return false,
        VocabParallelSupport::Unsupported => return true,
        VocabParallelSupport::TopK(most) => most,
    };
    questions.iter().any(|question| {
        let sampling = &seats.get(batch.rows[question.row].seq_slot).sampling;
        question.known_token.is_some()
            || question.top_logprobs.is_some()
            || !fits_vocab_parallel(sampling, vocab, most)
    })
}

/// Whether sampling is greedy, Gumbel-max over all ids, or has a `top_k` of at most `most`.
fn fits_vocab_parallel(sampling: &SamplingParams, vocab: usize, most: usize) -> bool {
    let top_k = sampling.top_k as usize;
    if sampling.temperature < GREEDY_BELOW {
        true
    } else if (1..vocab).contains(&top_k) {
        top_k <= most
    } else {
        sampling.top_p >= 1.0 && sampling.min_p <= 0.0
    }
}

/// Removes the sample positions of rows whose bitmask is overdue.
pub(crate) fn drop_overdue(questions: &mut Vec<LogitsRow>, masks: &StepBitmasks) {
    questions.retain(|question| question.known_token.is_some() || !masks.is_overdue(question.row));
}

/// Whether any logits row reports top log-probabilities.
pub(crate) fn wants_top_logprobs(slice: &[LogitsRow]) -> bool {
    slice.iter().any(|question| question.top_logprobs.is_some_and(|top| top > 0))
}

/// Writes the sampled tokens of a slice to the output of its rows.
pub(crate) fn write_outputs(slice: &[LogitsRow], answers: &SamplerOutputs, rows: &mut [RowOutput]) {
    for (q, (question, answer)) in slice.iter().zip(answers.iter()).enumerate() {
        let output = &mut rows[question.row];
        let reached = question.known_token.is_some() || question.draft_index == output.accepted;
        if output.error.is_some() || !reached {
            continue; // Positions after a rejected draft token have no meaning.
        }
        match error_of(&answer) {
            // As without drafts: the tokens before the error are emitted, and the next step runs into the
            // error.
            Some(_) if output.accepted > 0 && question.known_token.is_none() => {
                output.accepted -= 1;
            }
            Some(error) => *output = RowOutput { error: Some(error), ..RowOutput::default() },
            None => write_output(question, q, &answer, answers, output),
        }
    }
}

fn error_of(answer: &SampledToken) -> Option<RowError> {
    match answer.status {
        ops::SAMPLE_OK | ops::SAMPLE_DRAFT_ACCEPTED => None,
        ops::SAMPLE_ALL_MASKED => Some(RowError::AllMasked),
        _ => Some(RowError::NonFiniteLogits),
    }
}

fn write_output(
    question: &LogitsRow,
    q: usize,
    answer: &SampledToken,
    answers: &SamplerOutputs,
    output: &mut RowOutput,
) {
    let (token, right) = (answer.token as Token, answer.status == ops::SAMPLE_DRAFT_ACCEPTED);
    let logprobs = question.top_logprobs.map(|top| TokenLogprobs {
        token,
        logprob: answer.logprob,
        rank: answer.rank,
        top_logprobs: answers.top(q, top as usize).collect(),
    });
    if question.known_token.is_some() {
        output.prompt_logprobs.extend(logprobs);
    } else {
        output.sampled_tokens.push(token);
        output.accepted += u8::from(right);
        output.logprobs.extend(logprobs);
    }
}

/// Bytes of a stage for the largest step, with `words` words.
pub(crate) fn stage_bytes(limits: &StepLimits, questions: usize, words: usize) -> usize {
    let row = size_of::<ops::StageRow>() + ops::RowFact::COUNT * size_of::<i32>();
    let records = limits.stage_rows() * row
        + limits.rows * (size_of::<ops::StageSequenceInit>() + size_of::<ops::DraftRow>())
        + questions * size_of::<StageLogitsRow>()
        + edits_max(limits) * size_of::<ops::StageEdit>();
    let regions = 8 * 64;
    size_of::<ops::StageHeader>() + regions + records + words * size_of::<i32>()
}

/// Maximum number of edits of one stage: one request may bias its whole vocabulary.
pub(crate) fn edits_max(limits: &StepLimits) -> usize {
    limits.vocab.max(1 << 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vocab_parallel_covers_small_cutoffs() {
        let drawn = SamplingParams { temperature: 0.7, ..SamplingParams::greedy() };
        let top_k = |top_k| SamplingParams { top_k, ..drawn.clone() };
        let found = |sampling: &SamplingParams| fits_vocab_parallel(sampling, 1000, 64);
        let cut = |sampling: SamplingParams| SamplingParams { top_p: 0.9, min_p: 0.1, ..sampling };
        for sampling in [drawn.clone(), top_k(1), top_k(64), cut(top_k(64)), top_k(1000)] {
            assert!(found(&sampling), "{sampling:?}");
        }
        let top_p = SamplingParams { top_p: 0.9, ..drawn.clone() };
        let min_p = SamplingParams { min_p: 0.1, ..drawn.clone() };
        for sampling in [top_p, min_p, top_k(65), cut(top_k(1000))] {
            assert!(!found(&sampling), "{sampling:?}");
            assert!(found(&SamplingParams { temperature: 0.0, ..sampling }), "the likeliest");
        }
    }
}
