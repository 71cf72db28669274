//! The steps around a forward pass on the CPU: what a stage says becomes arrays, and logits become answers.
//!
//! The device twins are `csrc/prepare` and `csrc/sample`.

use std::collections::HashMap;

use super::CpuDevice;
use super::sample::acceptance_noise;
use crate::check::{check_dtype, check_size};
use crate::cpu::sample::rules::{Draw, Edits, Pick, RowAnswer, RowRequest, Rules, Seen, Unusable};
use crate::step::{
    ANSWER_ALL_MASKED, ANSWER_NON_FINITE, ANSWER_OK, ANSWER_STANDS, Answer, AnswerArrays, Judge,
    Laid, Newest, RULE_HISTORY, RULE_MASKED, SeatArrays, SeatRules, StageEdit, StageInit,
    StageQuestion, StageRead, StageRow, StageView, StepArrays,
};
use crate::{DType, DeviceError, Gather, Mat, VocabPart};

/// Temperatures below this one mean argmax.
pub const GREEDY_BELOW: f32 = 1e-5;
/// Words of a `SeatRules` record.
const RULE_WORDS: usize = size_of::<SeatRules>() / 4;
/// Words of an `Answer` record.
const ANSWER_WORDS: usize = size_of::<Answer>() / 4;

impl CpuDevice {
    pub(super) fn prepare_step(
        stage: &StageView<'_>,
        seats: &mut SeatArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError> {
        let read = StageRead::new(stage.bytes)?;
        for init in read.inits {
            take_seat(init, &read, seats)?;
        }
        step.cu_q.row_mut::<i32>(0)[0] = 0;
        let mut end = 0;
        for r in 0..stage.rows {
            let (mut context, mut seat) = (0, 0); // Of padding.
            if let Some(row) = read.rows.get(r) {
                update_table(row, &read, seats)?;
                let start = start_of(row, seats);
                lay_out((row, start), &read, seats, step, block_tokens)?;
                end = row.token + row.len;
                (context, seat) = (start + row.len, row.seat);
            }
            step.context_lens.row_mut::<i32>(0)[r] = context;
            step.row_seats.row_mut::<i32>(0)[r] = seat;
            step.cu_q.row_mut::<i32>(0)[r + 1] = end;
        }
        for t in end as usize..stage.tokens {
            step.ids.row_mut::<i32>(0)[t] = 0;
            step.positions.row_mut::<i32>(0)[t] = 0;
            step.slots.row_mut::<i64>(0)[t] = -1;
        }
        for q in 0..stage.questions {
            let token = read.questions.get(q).map_or(0, |question| question.token.max(0));
            step.question_tokens.row_mut::<i32>(0)[q] = token;
        }
        Ok(())
    }

    pub(super) fn answer_questions(
        &self,
        logits: Mat<'_>,
        (stage, laid): (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
    ) -> Result<(), DeviceError> {
        answer(logits, (stage, laid), seats, answers, |logits, rows| {
            Ok(self.sampler().answer(self.threads(), logits, rows))
        })
    }

    pub(super) fn answer_in_parts(
        &self,
        (logits, part): (Mat<'_>, &VocabPart),
        (stage, laid): (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        check_size("sample_parts", "columns of logits", logits.cols(), part.cols)?;
        answer(logits, (stage, laid), seats, answers, |logits, rows| {
            self.sampler().answer_parts(self.threads(), (logits, part), rows, gather)
        })
    }
}

/// Asks `find` about the rows of `logits` that a stage has questions about, and enters what it finds.
fn answer(
    logits: Mat<'_>,
    (stage, laid): (&StageView<'_>, &Laid<'_>),
    seats: &mut SeatArrays<'_>,
    answers: &mut AnswerArrays<'_>,
    find: impl FnOnce(Mat<'_>, &[RowRequest<'_>]) -> Result<Vec<RowAnswer>, DeviceError>,
) -> Result<(), DeviceError> {
    check_dtype("sample_rows", "logits", logits.dtype(), DType::F32)?;
    let read = StageRead::new(stage.bytes)?;
    let asked = &read.questions[..read.questions.len().min(logits.rows())];
    check_size("sample_rows", "width of an answer", answers.answers.cols(), ANSWER_WORDS)?;
    let rules: Vec<RowRules> =
        asked.iter().map(|q| RowRules::new(q, &read, laid, seats)).collect::<Result<_, _>>()?;
    let rows: Vec<RowRequest<'_>> = asked.iter().zip(&rules).map(|(q, r)| r.request(q)).collect();
    let found = find(logits.rows_from(0, asked.len()), &rows)?;
    for (i, (question, answer)) in asked.iter().zip(found).enumerate() {
        let mut words = enter(i, question, answer, answers);
        if question.token >= 0 && question.known < 0 {
            remember(question, rules[i].position, &mut words, laid, seats);
        }
        // SAFETY: the record is exactly ANSWER_WORDS words without padding.
        let words: [i32; ANSWER_WORDS] = unsafe { std::mem::transmute(words) };
        answers.answers.row_mut::<i32>(i).copy_from_slice(&words);
    }
    Ok(())
}

/// Sets up a seat for its request.
fn take_seat(
    init: &StageInit,
    read: &StageRead<'_>,
    seats: &mut SeatArrays<'_>,
) -> Result<(), DeviceError> {
    let seat = index("seat", init.seat, seats.rules.rows())?;
    let history = read.words(init.history_at, init.history_len)?;
    let from = init.history_from.max(0) as usize;
    let row = seats.history.row_mut::<i32>(seat);
    index("history", (from + history.len()) as i32, row.len() + 1)?;
    row[from..from + history.len()].copy_from_slice(history);
    if init.mask_at >= 0 {
        let mask = seats.masks.row_mut::<i32>(seat);
        mask.copy_from_slice(read.words(init.mask_at, mask.len() as i32)?);
    }
    // SAFETY: the record is exactly RULE_WORDS words without padding.
    let words: [i32; RULE_WORDS] = unsafe { std::mem::transmute(init.rules) };
    seats.rules.row_mut::<i32>(seat).copy_from_slice(&words);
    Ok(())
}

fn rules_of(seats: &SeatArrays<'_>, seat: usize) -> SeatRules {
    let words = seats.rules.as_ref().row::<i32>(seat);
    let words: [i32; RULE_WORDS] = std::array::from_fn(|i| words[i]);
    // SAFETY: the record is exactly RULE_WORDS words, and any bits are a record.
    unsafe { std::mem::transmute(words) }
}

fn update_table(
    row: &StageRow,
    read: &StageRead<'_>,
    seats: &mut SeatArrays<'_>,
) -> Result<(), DeviceError> {
    let entries = read.words(row.table_at, row.table_len)?;
    let seat = index("seat", row.seat, seats.tables.rows())?;
    let table = seats.tables.row_mut::<i32>(seat);
    let from = row.table_from.max(0) as usize;
    index("table", (from + entries.len()) as i32, table.len() + 1)?;
    table[from..from + entries.len()].copy_from_slice(entries);
    Ok(())
}

/// Position of the first token of a row: the host's, or the seat's, which lies within what the host has covered.
fn start_of(row: &StageRow, seats: &SeatArrays<'_>) -> i32 {
    if row.ids >= 0 {
        return row.start;
    }
    row.start.min(newest_of(seats, row.seat as usize).position - 1 - row.ids)
}

fn newest_of(seats: &SeatArrays<'_>, seat: usize) -> Newest {
    let words = seats.newest.as_ref().row::<i32>(seat);
    Newest { token: words[0], position: words[1], stands: words[2] }
}

/// Ids, positions and slots: position `p` lies in slot `table[p / bs] · bs + p mod bs`.
fn lay_out(
    (row, start): (&StageRow, i32),
    read: &StageRead<'_>,
    seats: &SeatArrays<'_>,
    step: &mut StepArrays<'_>,
    block_tokens: usize,
) -> Result<(), DeviceError> {
    let seat = row.seat as usize;
    let newest = newest_of(seats, seat).token;
    let ids = if row.ids < 0 { &[] } else { read.words(row.ids, row.len)? };
    let table = seats.tables.as_ref().row::<i32>(seat);
    for i in 0..row.len as usize {
        let (t, position) = (row.token as usize + i, start as usize + i);
        let id = ids.get(i).copied().unwrap_or(newest);
        let block = table[index("table", (position / block_tokens) as i32, table.len())?];
        step.ids.row_mut::<i32>(0)[t] = id;
        step.positions.row_mut::<i32>(0)[t] = position as i32;
        let slot = i64::from(block) * block_tokens as i64 + (position % block_tokens) as i64;
        step.slots.row_mut::<i64>(0)[t] = slot;
    }
    Ok(())
}

pub(super) fn index(what: &'static str, index: i32, limit: usize) -> Result<usize, DeviceError> {
    match usize::try_from(index) {
        Ok(i) if i < limit => Ok(i),
        _ => {
            let (kernel, index) = ("prepare", i64::from(index));
            Err(DeviceError::Index { kernel, what, index, limit })
        }
    }
}

/// The rules of one question, as lists.
struct RowRules {
    rules: SeatRules,
    allowed: Option<Vec<u32>>,
    banned: Vec<u32>,
    bias: Vec<(u32, f32)>,
    seen: Vec<Seen>,
    /// Of the token asked for.
    position: i32,
}

impl RowRules {
    fn new(
        question: &StageQuestion,
        read: &StageRead<'_>,
        laid: &Laid<'_>,
        seats: &SeatArrays<'_>,
    ) -> Result<Self, DeviceError> {
        let mut new = Self {
            rules: SeatRules::default(),
            allowed: None,
            banned: Vec::new(),
            bias: Vec::new(),
            seen: Vec::new(),
            position: 0,
        };
        if question.token < 0 || question.known >= 0 {
            return Ok(new); // Padding, or nothing to choose.
        }
        let seat = index("seat", question.seat, seats.rules.rows())?;
        new.rules = rules_of(seats, seat);
        let token = index("token", question.token, laid.positions.cols())?;
        new.position = laid.positions.row::<i32>(0)[token] + 1;
        let known = index("position", new.position, seats.history.cols() + 1)?;
        let history = &seats.history.as_ref().row::<i32>(seat)[..known];
        if new.rules.flags & RULE_MASKED != 0 {
            new.allowed = Some(ids_of(seats.masks.as_ref().row::<i32>(seat)));
        }
        if new.rules.flags & RULE_HISTORY != 0 {
            new.seen = count(history, new.rules.prompt_len.max(0) as usize);
        }
        let (from, len) = (question.edits_at as usize, question.edits as usize);
        for edit in read.edits.iter().skip(from).take(len) {
            if !applies(edit, history, read)? {
                continue;
            }
            if edit.value == f32::NEG_INFINITY {
                new.banned.push(edit.id);
            } else {
                new.bias.push((edit.id, edit.value));
            }
        }
        Ok(new)
    }

    fn request(&self, question: &StageQuestion) -> RowRequest<'_> {
        let rules = &self.rules;
        let draw = Draw {
            temperature: rules.temperature,
            min_p: rules.min_p,
            top_k: rules.top_k as usize,
            top_p: rules.top_p,
            key: rules.key,
            position: self.position as u32,
        };
        let edits = Edits {
            allowed: self.allowed.as_deref(),
            banned: &self.banned,
            bias: &self.bias,
            seen: &self.seen,
            repetition: rules.repetition,
            frequency: rules.frequency,
            presence: rules.presence,
        };
        let draw = (rules.temperature >= GREEDY_BELOW).then_some(draw);
        let pick = match u32::try_from(question.known) {
            Ok(known) => Pick::Known(known),
            Err(_) => Pick::Choose(Rules { edits, draw }),
        };
        RowRequest { pick, logprobs: usize::try_from(question.top).ok() }
    }
}

/// Whether an edit is for the token behind `history`.
fn applies(edit: &StageEdit, history: &[i32], read: &StageRead<'_>) -> Result<bool, DeviceError> {
    if edit.when_len < 0 {
        return Ok((history.len() as i64) < i64::from(edit.when_at));
    }
    Ok(history.ends_with(read.words(edit.when_at, edit.when_len)?))
}

/// Ids whose bit is set.
fn ids_of(mask: &[i32]) -> Vec<u32> {
    let bits = |(word, bits): (usize, &i32)| {
        let bits = *bits as u32;
        (0..32).filter(move |i| bits >> i & 1 == 1).map(move |i| word as u32 * 32 + i)
    };
    mask.iter().enumerate().flat_map(bits).collect()
}

/// The different ids in order of appearance, with their occurrences from `prompt_len` on.
fn count(history: &[i32], prompt_len: usize) -> Vec<Seen> {
    let mut seen: Vec<Seen> = Vec::new();
    let mut places = HashMap::new();
    for (position, &id) in history.iter().enumerate() {
        let place = *places.entry(id).or_insert_with(|| {
            seen.push(Seen { id: id as u32, count: 0 });
            seen.len() - 1
        });
        seen[place].count += u32::from(position >= prompt_len);
    }
    seen
}

/// The record of an answer, whose lists are written.
fn enter(
    row: usize,
    question: &StageQuestion,
    answer: RowAnswer,
    answers: &mut AnswerArrays<'_>,
) -> Answer {
    let mut words = Answer { token: -1, ..Answer::default() };
    match answer {
        _ if question.token < 0 => {}
        Err(Unusable::NonFinite) => words.status = ANSWER_NON_FINITE,
        Err(Unusable::AllMasked) => words.status = ANSWER_ALL_MASKED,
        Ok(picked) => {
            words.status = ANSWER_OK;
            words.token = picked.token as i32;
            if let Some(logprobs) = picked.logprobs {
                (words.logprob, words.rank) = (logprobs.logprob, logprobs.rank);
                let ids = answers.top_ids.row_mut::<i32>(row);
                for (slot, &(id, _)) in ids.iter_mut().zip(&logprobs.top) {
                    *slot = id as i32;
                }
                let values = answers.top_logprobs.row_mut::<f32>(row);
                for (slot, &(_, value)) in values.iter_mut().zip(&logprobs.top) {
                    *slot = value;
                }
            }
        }
    }
    words
}

/// Judges the draft behind a token that was to be chosen at `position`, and makes the token the seat's newest if all drafts
/// in front of it stand.
fn remember(
    question: &StageQuestion,
    position: i32,
    answer: &mut Answer,
    laid: &Laid<'_>,
    seats: &mut SeatArrays<'_>,
) {
    let seat = question.seat as usize;
    let (rules, before) = (rules_of(seats, seat), newest_of(seats, seat));
    let found = answer.status == ANSWER_OK;
    let counts = question.place == 0 || before.stands != 0;
    if found && counts && question.draft != 0 {
        let draft = laid.ids.row::<i32>(0)[question.token as usize + 1];
        let stands = match laid.judge {
            Judge::Nobody => false,
            Judge::Answers => draft == answer.token,
            Judge::Chance { per_mille } => {
                acceptance_noise(rules.key, position as u32) * 1000.0 < f32::from(per_mille)
            }
        };
        if stands {
            (answer.token, answer.status) = (draft, ANSWER_STANDS);
        }
    }
    if found
        && rules.flags & RULE_HISTORY != 0
        && let Some(slot) = seats.history.row_mut::<i32>(seat).get_mut(position as usize)
    {
        *slot = answer.token;
    }
    let mut newest = before;
    if counts && (found || question.place == 0) {
        // An error behind drafts leaves the token in front of it the newest.
        newest = Newest { token: if found { answer.token } else { 0 }, position, stands: 0 };
    }
    newest.stands = i32::from(answer.status == ANSWER_STANDS);
    let words = [newest.token, newest.position, newest.stands];
    seats.newest.row_mut::<i32>(seat).copy_from_slice(&words);
}
