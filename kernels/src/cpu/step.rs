//! CPU kernels before and after a forward pass: prepare the inputs of a step from its stage, and sample
//! tokens from logits.
//!
//! The device twins are `csrc/prepare` and `csrc/sample`.

use std::collections::HashMap;

use device::{DType, DeviceError, MatRef, check_at_least, check_dtype, check_size};

use super::sample::acceptance_noise;
use crate::cpu::CpuBackend;
use crate::cpu::sample::rules::{
    DrawParams, LogitEdits, RowSampleResult, SampleError, SampleRequest, SamplingRules,
    TokenChoice, TokenOccurrence,
};
use crate::step::{
    DraftVerification, LatestToken, PreparedStep, RULE_HISTORY, RULE_MASKED, SAMPLE_ALL_MASKED,
    SAMPLE_DRAFT_ACCEPTED, SAMPLE_NON_FINITE, SAMPLE_OK, SampledToken, SamplerOutputArrays,
    SequenceSamplingParams, SequenceSlotArrays, StageEdit, StageLogitsRow, StageReader, StageRow,
    StageSequenceInit, StageView, StepArrays,
};
use crate::{CpuKernel, RowSampling, StepPreparation, VocabParallelSampling};

/// Temperature below which sampling is greedy.
pub const GREEDY_BELOW: f32 = 1e-5;
/// Number of 32-bit words of a `SequenceSamplingParams` record.
const RULE_WORDS: usize = size_of::<SequenceSamplingParams>() / 4;
/// Number of 32-bit words of a `SampledToken` record.
const SAMPLE_WORDS: usize = size_of::<SampledToken>() / 4;

impl CpuKernel for VocabParallelSampling<'_, '_, '_, '_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self {
            logits,
            shard: part,
            stage,
            prepared: laid,
            slots: seats,
            outputs: answers,
            gather,
        } = self;
        check_size("sample_vocab_parallel", "columns of logits", logits.cols(), part.cols)?;
        sample_and_store(logits, (stage, laid), seats, answers, |logits, rows| {
            cpu.sampler().sample_vocab_parallel(cpu.threads(), (logits, part), rows, gather)
        })
    }
}

impl CpuKernel for RowSampling<'_, '_, '_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { logits, stage, prepared: laid, slots: seats, outputs: answers } = self;
        sample_and_store(logits, (stage, laid), seats, answers, |logits, rows| {
            Ok(cpu.sampler().sample_rows(cpu.threads(), logits, rows))
        })
    }
}

impl CpuKernel for StepPreparation<'_, '_, '_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { stage, slots: seats, step, block_tokens } = self;
        let read = StageReader::new(stage.bytes)?;
        check_at_least("prepare", "row facts", step.row_facts.rows(), read.facts_per_row)?;
        for init in read.inits {
            init_sequence(init, &read, seats)?;
        }
        step.cu_q.row_mut::<i32>(0)[0] = 0;
        let mut end = 0;
        for r in 0..stage.rows {
            let mut context = 0; // Context length of a padding row.
            if let Some(row) = read.rows.get(r) {
                update_table(row, &read, seats)?;
                let start = start_of(row, seats);
                lay_out((row, start), &read, seats, step, block_tokens)?;
                end = row.token + row.len;
                context = start + row.len;
            }
            step.context_lens.row_mut::<i32>(0)[r] = context;
            step.cu_q.row_mut::<i32>(0)[r + 1] = end;
            for fact in 0..read.facts_per_row {
                let value = read.facts.get(r * read.facts_per_row + fact).copied().unwrap_or(0);
                step.row_facts.row_mut::<i32>(fact)[r] = value;
            }
        }
        for t in end as usize..stage.tokens {
            step.ids.row_mut::<i32>(0)[t] = 0;
            step.positions.row_mut::<i32>(0)[t] = 0;
            step.slots.row_mut::<i64>(0)[t] = -1;
        }
        for q in 0..stage.logits_rows {
            let token = read.logits_rows.get(q).map_or(0, |question| question.token.max(0));
            step.logits_indices.row_mut::<i32>(0)[q] = token;
        }
        Ok(())
    }
}

/// Samples the logits rows of a stage with `find` and stores the results.
fn sample_and_store(
    logits: MatRef<'_>,
    (stage, laid): (&StageView<'_>, &PreparedStep<'_>),
    seats: &mut SequenceSlotArrays<'_>,
    answers: &mut SamplerOutputArrays<'_>,
    find: impl FnOnce(MatRef<'_>, &[SampleRequest<'_>]) -> Result<Vec<RowSampleResult>, DeviceError>,
) -> Result<(), DeviceError> {
    check_dtype("sample_rows", "logits", logits.dtype(), DType::F32)?;
    let read = StageReader::new(stage.bytes)?;
    let asked = &read.logits_rows[..read.logits_rows.len().min(logits.rows())];
    check_size("sample_rows", "width of an answer", answers.sampled.cols(), SAMPLE_WORDS)?;
    let rules: Vec<RowSamplingRules> = asked
        .iter()
        .map(|q| RowSamplingRules::new(q, &read, laid, seats))
        .collect::<Result<_, _>>()?;
    let rows: Vec<SampleRequest<'_>> =
        asked.iter().zip(&rules).map(|(q, r)| r.request(q)).collect();
    let found = find(logits.rows_from(0, asked.len()), &rows)?;
    for (i, (question, answer)) in asked.iter().zip(found).enumerate() {
        let mut words = write_sample(i, question, answer, answers);
        if question.token >= 0 && question.known_token < 0 {
            update_latest_token(question, rules[i].position, &mut words, laid, seats);
        }
        // SAFETY: the record is exactly SAMPLE_WORDS words without padding.
        let words: [i32; SAMPLE_WORDS] = unsafe { std::mem::transmute(words) };
        answers.sampled.row_mut::<i32>(i).copy_from_slice(&words);
    }
    Ok(())
}

/// Initialises a sequence slot for its request.
fn init_sequence(
    init: &StageSequenceInit,
    read: &StageReader<'_>,
    seats: &mut SequenceSlotArrays<'_>,
) -> Result<(), DeviceError> {
    let seat = index("seat", init.seq_slot, seats.params.rows())?;
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
    let words: [i32; RULE_WORDS] = unsafe { std::mem::transmute(init.params) };
    seats.params.row_mut::<i32>(seat).copy_from_slice(&words);
    Ok(())
}

fn sampling_rules(seats: &SequenceSlotArrays<'_>, seat: usize) -> SequenceSamplingParams {
    let words = seats.params.as_ref().row::<i32>(seat);
    let words: [i32; RULE_WORDS] = std::array::from_fn(|i| words[i]);
    // SAFETY: the record is exactly RULE_WORDS words, and any bits are a record.
    unsafe { std::mem::transmute(words) }
}

fn update_table(
    row: &StageRow,
    read: &StageReader<'_>,
    seats: &mut SequenceSlotArrays<'_>,
) -> Result<(), DeviceError> {
    let entries = read.words(row.table_at, row.table_len)?;
    let seat = index("seat", row.seq_slot, seats.tables.rows())?;
    let table = seats.tables.row_mut::<i32>(seat);
    let from = row.table_from.max(0) as usize;
    index("table", (from + entries.len()) as i32, table.len() + 1)?;
    table[from..from + entries.len()].copy_from_slice(entries);
    Ok(())
}

/// Position of the first token of a row: set by the host, or computed from the latest token of the sequence
/// slot, with the position set by the host as upper bound.
fn start_of(row: &StageRow, seats: &SequenceSlotArrays<'_>) -> i32 {
    if row.ids >= 0 {
        return row.start;
    }
    row.start.min(latest_token_of(seats, row.seq_slot as usize).position - 1 - row.ids)
}

fn latest_token_of(seats: &SequenceSlotArrays<'_>, seat: usize) -> LatestToken {
    let words = seats.latest.as_ref().row::<i32>(seat);
    LatestToken { token: words[0], position: words[1], draft_accepted: words[2] }
}

/// Writes token ids, positions and KV slots: position `p` has slot `table[p / bs] · bs + p mod bs` for block
/// size `bs`.
fn lay_out(
    (row, start): (&StageRow, i32),
    read: &StageReader<'_>,
    seats: &SequenceSlotArrays<'_>,
    step: &mut StepArrays<'_>,
    block_tokens: usize,
) -> Result<(), DeviceError> {
    let seat = row.seq_slot as usize;
    let newest = latest_token_of(seats, seat).token;
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

/// Sampling rules of one logits row, as lists.
struct RowSamplingRules {
    rules: SequenceSamplingParams,
    allowed: Option<Vec<u32>>,
    banned: Vec<u32>,
    bias: Vec<(u32, f32)>,
    seen: Vec<TokenOccurrence>,
    /// Sample position.
    position: i32,
}

impl RowSamplingRules {
    fn new(
        question: &StageLogitsRow,
        read: &StageReader<'_>,
        laid: &PreparedStep<'_>,
        seats: &SequenceSlotArrays<'_>,
    ) -> Result<Self, DeviceError> {
        let mut new = Self {
            rules: SequenceSamplingParams::default(),
            allowed: None,
            banned: Vec::new(),
            bias: Vec::new(),
            seen: Vec::new(),
            position: 0,
        };
        if question.token < 0 || question.known_token >= 0 {
            return Ok(new); // Padding, or a known token: no rules.
        }
        let seat = index("seat", question.seq_slot, seats.params.rows())?;
        new.rules = sampling_rules(seats, seat);
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

    fn request(&self, question: &StageLogitsRow) -> SampleRequest<'_> {
        let rules = &self.rules;
        let draw = DrawParams {
            temperature: rules.temperature,
            min_p: rules.min_p,
            top_k: rules.top_k as usize,
            top_p: rules.top_p,
            key: rules.key,
            position: self.position as u32,
        };
        let edits = LogitEdits {
            allowed: self.allowed.as_deref(),
            banned: &self.banned,
            bias: &self.bias,
            seen: &self.seen,
            repetition: rules.repetition,
            frequency: rules.frequency,
            presence: rules.presence,
        };
        let draw = (rules.temperature >= GREEDY_BELOW).then_some(draw);
        let pick = match u32::try_from(question.known_token) {
            Ok(known) => TokenChoice::Known(known),
            Err(_) => TokenChoice::Sample(SamplingRules { edits, draw }),
        };
        SampleRequest { pick, logprobs: usize::try_from(question.top).ok() }
    }
}

/// Whether an edit applies to the token after `history`.
fn applies(edit: &StageEdit, history: &[i32], read: &StageReader<'_>) -> Result<bool, DeviceError> {
    if edit.when_len < 0 {
        return Ok((history.len() as i64) < i64::from(edit.when_at));
    }
    Ok(history.ends_with(read.words(edit.when_at, edit.when_len)?))
}

/// Token ids with a set bit.
fn ids_of(mask: &[i32]) -> Vec<u32> {
    let bits = |(word, bits): (usize, &i32)| {
        let bits = *bits as u32;
        (0..32).filter(move |i| bits >> i & 1 == 1).map(move |i| word as u32 * 32 + i)
    };
    mask.iter().enumerate().flat_map(bits).collect()
}

/// Distinct token ids in order of appearance, with their numbers of occurrences from `prompt_len` on.
fn count(history: &[i32], prompt_len: usize) -> Vec<TokenOccurrence> {
    let mut seen: Vec<TokenOccurrence> = Vec::new();
    let mut places = HashMap::new();
    for (position, &id) in history.iter().enumerate() {
        let place = *places.entry(id).or_insert_with(|| {
            seen.push(TokenOccurrence { id: id as u32, count: 0 });
            seen.len() - 1
        });
        seen[place].count += u32::from(position >= prompt_len);
    }
    seen
}

/// Returns the record of a sampled row and writes its top log-probabilities to `answers`.
fn write_sample(
    row: usize,
    question: &StageLogitsRow,
    answer: RowSampleResult,
    answers: &mut SamplerOutputArrays<'_>,
) -> SampledToken {
    let mut words = SampledToken { token: -1, ..SampledToken::default() };
    match answer {
        _ if question.token < 0 => {}
        Err(SampleError::NonFinite) => words.status = SAMPLE_NON_FINITE,
        Err(SampleError::AllMasked) => words.status = SAMPLE_ALL_MASKED,
        Ok(picked) => {
            words.status = SAMPLE_OK;
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

/// Verifies the draft token at `position`, and stores the sampled token as the latest token of the sequence
/// slot if all draft tokens before it are accepted.
fn update_latest_token(
    question: &StageLogitsRow,
    position: i32,
    answer: &mut SampledToken,
    laid: &PreparedStep<'_>,
    seats: &mut SequenceSlotArrays<'_>,
) {
    let seat = question.seq_slot as usize;
    let (rules, before) = (sampling_rules(seats, seat), latest_token_of(seats, seat));
    let found = answer.status == SAMPLE_OK;
    let counts = question.draft_index == 0 || before.draft_accepted != 0;
    if found && counts && question.has_draft != 0 {
        let draft = laid.ids.row::<i32>(0)[question.token as usize + 1];
        let stands = match laid.verification {
            DraftVerification::NoDrafts => false,
            DraftVerification::MatchSampled => draft == answer.token,
            DraftVerification::Synthetic { per_mille } => {
                acceptance_noise(rules.key, position as u32) * 1000.0 < f32::from(per_mille)
            }
        };
        if stands {
            (answer.token, answer.status) = (draft, SAMPLE_DRAFT_ACCEPTED);
        }
    }
    if found
        && rules.flags & RULE_HISTORY != 0
        && let Some(slot) = seats.history.row_mut::<i32>(seat).get_mut(position as usize)
    {
        *slot = answer.token;
    }
    let mut newest = before;
    if counts && (found || question.draft_index == 0) {
        // After an error at a draft position the latest token stays the token before that position.
        newest = LatestToken {
            token: if found { answer.token } else { 0 },
            position,
            draft_accepted: 0,
        };
    }
    newest.draft_accepted = i32::from(answer.status == SAMPLE_DRAFT_ACCEPTED);
    let words = [newest.token, newest.position, newest.draft_accepted];
    seats.latest.row_mut::<i32>(seat).copy_from_slice(&words);
}
