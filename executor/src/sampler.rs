//! What a batch asks about its logits, and how the answers enter the output.
//!
//! A row that samples asks about its last token and about each of its drafts, a row whose prompt is scored about each of
//! its tokens. A draft is accepted if its place is answered with the same id, as it would be without drafts: so the device
//! says, which goes on from there before the host hears of it. Logits are the largest result of a step, so they are made
//! in slices of bounded size.

use crate::inputs::StepLimits;
use crate::masks::StepMasks;
use crate::seats::{self, SeatState, Seats};
use kernels::cpu::GREEDY_BELOW;
use ops::{Answer, Answers, InParts, Stage, StageQuestion};
use protocol::{Batch, Input, Row, RowError, RowOutput, Sampling, Token, TokenLogprobs};

/// Bytes of logits made at a time on the CPU, where they compete for its caches.
const CPU_SLICE_BYTES: usize = 64 << 20;
/// Bytes of lists of likeliest ids made at a time.
const LIST_BYTES: usize = 64 << 20;

/// A question about the logits behind one token of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question {
    /// Row of the batch.
    row: usize,
    /// Token of the step whose hidden state is read.
    token: u32,
    /// Position of the token asked for, as if no draft of rows under way were accepted.
    least: u32,
    /// That token, if it is known: a prompt position to be scored.
    known: Option<Token>,
    /// Drafts in front of it that must be accepted.
    place: u8,
    /// Whether the step's next token is a draft of it.
    draft: bool,
    /// Likeliest ids to list; `None` = no log-probabilities.
    top: Option<u32>,
}

/// The same on a GPU, where a slice must hold the widest decode step.
const GPU_SLICE_BYTES: usize = 512 << 20;

/// Questions answered at a time: logits of `vocab` values and lists of `top` ids for each of them.
pub(crate) fn questions_per_slice(vocab: usize, top: usize, gpu: bool) -> usize {
    let bytes = if gpu { GPU_SLICE_BYTES } else { CPU_SLICE_BYTES };
    let logits = bytes / (vocab * size_of::<f32>()).max(1);
    let lists = LIST_BYTES / (top * (size_of::<f32>() + size_of::<Token>())).max(1);
    logits.min(lists).max(1)
}

/// All questions of a batch: samples first, in row order, then prompt positions. The lists are cut at
/// `top_max`, the vocabulary.
pub(crate) fn questions(batch: &Batch, seats: &Seats, top_max: usize, found: &mut Vec<Question>) {
    found.clear();
    let cut = |top: Option<u32>| top.map(|top| top.min(top_max as u32));
    let mut first = 0;
    for (r, row) in batch.rows.iter().enumerate() {
        let seat = seats.get(row.seat);
        if row.samples {
            let top = cut(seat.sampling.logprobs);
            let (token, least) = (first + row.len - 1, row.start + row.len);
            let drafts = seat.drafts();
            found.extend((0..=drafts).map(|i| {
                let (token, least, place, draft) = (token + i, least + i, i as u8, i < drafts);
                Question { row: r, token, least, known: None, place, draft, top }
            }));
        }
        first += row.len + seat.drafts();
    }
    first = 0;
    for (r, row) in batch.rows.iter().enumerate() {
        let seat = seats.get(row.seat);
        if let Some(top) = cut(seat.sampling.prompt_logprobs) {
            found.extend(scored(r, row, first, seat, top));
        }
        first += row.len + seat.drafts();
    }
}

/// Prompt positions `start + 1 ..` that the row's tokens predict.
fn scored<'a>(
    r: usize,
    row: &'a Row,
    first: u32,
    seat: &SeatState,
    top: u32,
) -> impl Iterator<Item = Question> + 'a {
    let ids = match &row.input {
        Input::Tokens(ids) => &ids[..],
        Input::SampledAt { .. } => &[], // Output, never scored.
    };
    let successors = ids.iter().skip(1).copied().chain(row.next);
    let in_prompt = seat.prompt_len.saturating_sub(row.start + 1) as usize;
    let question = move |(i, known): (u32, Token)| {
        let (token, least) = (first + i, row.start + i + 1);
        let (place, draft, known, top) = (0, false, Some(known), Some(top));
        Question { row: r, token, least, known, place, draft, top }
    };
    (0..).zip(successors.take(in_prompt)).map(question)
}

/// Stages a slice of questions with the changes of their logits and the masks of their rows.
pub(crate) fn stage_questions(
    slice: &[Question],
    batch: &Batch,
    (seats, masks): (&Seats, &StepMasks),
    vocab: usize,
    stage: &mut Stage,
) {
    for question in slice {
        let seat = batch.rows[question.row].seat;
        if let (None, Some(mask)) = (question.known, masks.of(question.row)) {
            seats::stage_mask(seat, seats.get(seat), mask, vocab, stage);
        }
        let (edits_at, edits) = match question.known {
            None => seats.get(seat).stage_edits(question.least, stage),
            Some(_) => (0, 0),
        };
        stage.questions.push(StageQuestion {
            token: question.token as i32,
            seat: seat.0 as i32,
            place: question.place.into(),
            draft: question.draft.into(),
            known: question.known.map_or(-1, |id| id as i32),
            top: question.top.map_or(-1, |top| top as i32),
            edits_at,
            edits,
        });
    }
}

/// Whether any of the questions is one that the device does not answer out of parts of its row.
pub(crate) fn want_whole_rows(
    questions: &[Question],
    (batch, seats): (&Batch, &Seats),
    vocab: usize,
    answered: InParts,
) -> bool {
    let most = match answered {
        InParts::Everything => return false,
        InParts::Nothing => return true,
        InParts::TopK(most) => most,
    };
    questions.iter().any(|question| {
        let sampling = &seats.get(batch.rows[question.row].seat).sampling;
        question.known.is_some()
            || question.top.is_some()
            || !is_found_in_parts(sampling, vocab, most)
    })
}

/// Whether a token is the likeliest, the noisiest of all, or one of so many likeliest at `most`.
fn is_found_in_parts(sampling: &Sampling, vocab: usize, most: usize) -> bool {
    let top_k = sampling.top_k as usize;
    if sampling.temperature < GREEDY_BELOW {
        true
    } else if (1..vocab).contains(&top_k) {
        top_k <= most
    } else {
        sampling.top_p >= 1.0 && sampling.min_p <= 0.0
    }
}

/// Leaves out the samples of rows whose mask is late.
pub(crate) fn drop_late(questions: &mut Vec<Question>, masks: &StepMasks) {
    questions.retain(|question| question.known.is_some() || !masks.is_late(question.row));
}

/// Whether any of the questions wants a list.
pub(crate) fn lists(slice: &[Question]) -> bool {
    slice.iter().any(|question| question.top.is_some_and(|top| top > 0))
}

/// Enters the answers of a slice into the output of its rows.
pub(crate) fn enter(slice: &[Question], answers: &Answers, rows: &mut [RowOutput]) {
    for (q, (question, answer)) in slice.iter().zip(answers.iter()).enumerate() {
        let output = &mut rows[question.row];
        let reached = question.known.is_some() || question.place == output.accepted;
        if output.error.is_some() || !reached {
            continue; // What is asked behind a rejected draft is about nothing.
        }
        match error_of(&answer) {
            // As without drafts: the tokens in front of it come out, and the next step meets the error.
            Some(_) if output.accepted > 0 && question.known.is_none() => output.accepted -= 1,
            Some(error) => *output = RowOutput { error: Some(error), ..RowOutput::default() },
            None => enter_one(question, q, &answer, answers, output),
        }
    }
}

fn error_of(answer: &Answer) -> Option<RowError> {
    match answer.status {
        ops::ANSWER_OK | ops::ANSWER_STANDS => None,
        ops::ANSWER_ALL_MASKED => Some(RowError::AllMasked),
        _ => Some(RowError::NonFiniteLogits),
    }
}

fn enter_one(
    question: &Question,
    q: usize,
    answer: &Answer,
    answers: &Answers,
    output: &mut RowOutput,
) {
    let (token, right) = (answer.token as Token, answer.status == ops::ANSWER_STANDS);
    let logprobs = question.top.map(|top| TokenLogprobs {
        token,
        logprob: answer.logprob,
        rank: answer.rank,
        top: answers.top(q, top as usize).collect(),
    });
    if question.known.is_some() {
        output.prompt_logprobs.extend(logprobs);
    } else {
        output.emitted.push(token);
        output.accepted += u8::from(right);
        output.logprobs.extend(logprobs);
    }
}

/// Words and edits that a stage must have room for beside the rows of a step.
pub(crate) fn stage_bytes(limits: &StepLimits, questions: usize, words: usize) -> usize {
    let records = limits.stage_rows() * size_of::<ops::StageRow>()
        + limits.rows * (size_of::<ops::StageInit>() + size_of::<ops::DraftRow>())
        + questions * size_of::<StageQuestion>()
        + edits_max(limits) * size_of::<ops::StageEdit>();
    let regions = 7 * 64;
    size_of::<ops::StageHeader>() + regions + records + words * size_of::<i32>()
}

/// Edits of one stage: one request may bias its whole vocabulary.
pub(crate) fn edits_max(limits: &StepLimits) -> usize {
    limits.vocab.max(1 << 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_in_parts_where_a_few_ids_decide() {
        let drawn = Sampling { temperature: 0.7, ..Sampling::greedy() };
        let top_k = |top_k| Sampling { top_k, ..drawn.clone() };
        let found = |sampling: &Sampling| is_found_in_parts(sampling, 1000, 64);
        let cut = |sampling: Sampling| Sampling { top_p: 0.9, min_p: 0.1, ..sampling };
        for sampling in [drawn.clone(), top_k(1), top_k(64), cut(top_k(64)), top_k(1000)] {
            assert!(found(&sampling), "{sampling:?}");
        }
        let top_p = Sampling { top_p: 0.9, ..drawn.clone() };
        let min_p = Sampling { min_p: 0.1, ..drawn.clone() };
        for sampling in [top_p, min_p, top_k(65), cut(top_k(1000))] {
            assert!(!found(&sampling), "{sampling:?}");
            assert!(found(&Sampling { temperature: 0.0, ..sampling }), "the likeliest");
        }
    }
}
