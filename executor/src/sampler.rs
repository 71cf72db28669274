//! From logits to the answers of rows: which rows are asked what, slice by slice.
//!
//! A row that samples asks about its last token, a row whose prompt is scored about each of its
//! tokens. Logits are the largest result of a step, so they are made in slices of bounded size.

use crate::inputs::Inputs;
use crate::seats::{SeatState, Seats};
use ops::sample::{Draw, Edits, Pick, Picked, RowAnswer, RowRequest, Rules, Unusable};
use protocol::{Batch, Row, RowError, RowOutput, Token, TokenLogprobs};

/// Temperatures below this one mean argmax.
const GREEDY_BELOW: f32 = 1e-5;

/// Bytes of logits made at a time.
const SLICE_BYTES: usize = 64 << 20;

/// A question about the logits behind one token of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question {
    /// Row of the batch.
    pub(crate) row: usize,
    /// Token of the step whose hidden state is read.
    pub(crate) token: i32,
    /// The successor, if it is known: a prompt position to be scored.
    known: Option<Token>,
}

/// Rows of logits per slice for a vocabulary of this size.
pub(crate) fn rows_per_slice(vocab: usize) -> usize {
    (SLICE_BYTES / (vocab * size_of::<f32>()).max(1)).max(1)
}

/// All questions of a batch: samples first, in row order, then prompt positions.
pub(crate) fn questions(batch: &Batch, inputs: &Inputs, seats: &Seats) -> Vec<Question> {
    let mut questions = Vec::with_capacity(batch.rows.len());
    for (r, row) in batch.rows.iter().enumerate().filter(|(_, row)| row.samples) {
        debug_assert_eq!(row.len as usize, inputs.tokens(r).len());
        let token = inputs.tokens(r).end as i32 - 1;
        questions.push(Question { row: r, token, known: None });
    }
    for (r, row) in batch.rows.iter().enumerate() {
        let seat = seats.get(row.seat);
        if seat.sampling.prompt_logprobs.is_some() {
            questions.extend(scored(r, row, inputs, seat));
        }
    }
    questions
}

/// Prompt positions `start + 1 ..` that the row's tokens predict.
fn scored<'a>(
    r: usize,
    row: &'a Row,
    inputs: &'a Inputs,
    seat: &SeatState,
) -> impl Iterator<Item = Question> + 'a {
    let tokens = inputs.tokens(r);
    let inner = inputs.ids[tokens.start + 1..tokens.end].iter().map(|&id| id as Token);
    let successors = inner.chain(row.next);
    let in_prompt = seat.prompt_len.saturating_sub(row.start + 1) as usize;
    (tokens.start as i32..).zip(successors.take(in_prompt)).map(move |(token, known)| Question {
        row: r,
        token,
        known: Some(known),
    })
}

/// Forms the requests for a slice of questions; `banned` holds one list per question.
pub(crate) fn requests<'a>(
    questions: &[Question],
    batch: &Batch,
    seats: &'a Seats,
    banned: &'a mut Vec<Vec<Token>>,
) -> Vec<RowRequest<'a>> {
    banned.resize_with(questions.len().max(banned.len()), Vec::new);
    for (question, banned) in questions.iter().zip(banned.iter_mut()) {
        let row = &batch.rows[question.row];
        seats.get(row.seat).banned(row.start + row.len, banned);
    }
    let request = |(question, banned): (&Question, &'a Vec<Token>)| {
        let row = &batch.rows[question.row];
        let seat = seats.get(row.seat);
        match question.known {
            None => RowRequest {
                pick: Pick::Choose(rules(seat, row.start + row.len, banned)),
                logprobs: seat.sampling.logprobs.map(|n| n as usize),
            },
            Some(token) => RowRequest {
                pick: Pick::Known(token),
                logprobs: seat.sampling.prompt_logprobs.map(|n| n as usize),
            },
        }
    };
    questions.iter().zip(banned.iter()).map(request).collect()
}

fn rules<'a>(seat: &'a SeatState, position: u32, banned: &'a [Token]) -> Rules<'a> {
    let s = &seat.sampling;
    let edits = Edits {
        allowed: s.allowed.as_deref(),
        banned,
        bias: &s.logit_bias,
        seen: seat.seen(),
        repetition: s.repetition,
        frequency: s.frequency,
        presence: s.presence,
    };
    let draw = Draw {
        temperature: s.temperature,
        min_p: s.min_p,
        top_k: s.top_k as usize,
        top_p: s.top_p,
        key: seat.key,
        position,
    };
    Rules { edits, draw: (s.temperature >= GREEDY_BELOW).then_some(draw) }
}

/// Enters an answer into the output of its row.
pub(crate) fn enter(question: &Question, answer: RowAnswer, output: &mut RowOutput) {
    let Picked { token, logprobs } = match answer {
        Ok(picked) => picked,
        Err(unusable) => {
            let error = match unusable {
                Unusable::NonFinite => RowError::NonFiniteLogits,
                Unusable::AllMasked => RowError::AllMasked,
            };
            *output = RowOutput { error: Some(error), ..RowOutput::default() };
            return;
        }
    };
    if output.error.is_some() {
        return;
    }
    let logprobs =
        logprobs.map(|l| TokenLogprobs { token, logprob: l.logprob, rank: l.rank, top: l.top });
    if question.known.is_some() {
        output.prompt_logprobs.extend(logprobs);
    } else {
        output.emitted.push(token);
        output.logprobs.extend(logprobs);
    }
}
