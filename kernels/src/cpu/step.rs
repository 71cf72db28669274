//! CPU kernels before and after a forward pass: prepare the inputs of a step from the staged inputs, and
//! sample tokens from logits. The GPU code for the same ops is `csrc/prepare` and `csrc/sample`.

use std::collections::HashMap;

use device::{DType, DeviceError, MatRef, check_at_least, check_dtype, check_size};

use super::sample::acceptance_noise;
use crate::cpu::CpuBackend;
use crate::cpu::sample::rules::{
    LogitEdits, RandomSamplingParams, RowSampleResult, SampleError, SampleOrScore, SampleRequest,
    SamplingRules, TokenOccurrence,
};
use crate::step::{
    DraftVerification, LatestToken, PreparedStep, RULE_HISTORY, RULE_MASKED, SAMPLE_ALL_MASKED,
    SAMPLE_DRAFT_ACCEPTED, SAMPLE_NON_FINITE, SAMPLE_OK, SampledToken, SamplerOutputArrays,
    SequenceSamplingParams, SequenceSlotArrays, StagedLogitEdit, StagedLogitsRow,
    StagedSequenceInit, StagedStepRow, StagedTableChange, StagingBufferView, StagingReader,
    StepInputArrays,
};
use crate::{CpuKernel, RowSampling, StepPreparation, VocabParallelSampling};

/// Temperature below which sampling is greedy.
pub const GREEDY_BELOW: f32 = 1e-5;
/// Number of 32-bit words of a `SequenceSamplingParams` record.
const PARAMS_WORDS: usize = size_of::<SequenceSamplingParams>() / 4;
/// Number of 32-bit words of a `SampledToken` record.
const SAMPLE_WORDS: usize = size_of::<SampledToken>() / 4;

impl CpuKernel for VocabParallelSampling<'_, '_, '_, '_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { logits, shard, stage, prepared, slots, outputs, gather } = self;
        check_size("sample_vocab_parallel", "columns of logits", logits.cols(), shard.cols)?;
        sample_and_store(logits, stage, prepared, slots, outputs, |logits, requests| {
            cpu.sampler().sample_vocab_parallel(cpu.threads(), logits, shard, requests, gather)
        })
    }
}

impl CpuKernel for RowSampling<'_, '_, '_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { logits, stage, prepared, slots, outputs } = self;
        sample_and_store(logits, stage, prepared, slots, outputs, |logits, requests| {
            Ok(cpu.sampler().sample_rows(cpu.threads(), logits, requests))
        })
    }
}

impl CpuKernel for StepPreparation<'_, '_, '_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { stage, slots, step, block_tokens } = self;
        let read = StagingReader::new(stage.bytes)?;
        check_at_least("prepare", "row facts", step.row_facts.rows(), read.facts_per_row)?;
        let groups = step.slots.rows();
        let seq_slots = slots.slots_of_groups(groups)?;
        let further_changes = read.table_changes(groups)?;
        for init in read.inits {
            init_sequence(init, &read, slots)?;
        }
        step.cu_q.row_mut::<i32>(0)[0] = 0;
        let mut end = 0;
        for r in 0..stage.rows {
            let mut context = 0; // Context length of a padding row.
            if let Some(row) = read.rows.get(r) {
                let seq_slot = index("sequence slot", row.seq_slot, seq_slots)?;
                let start = start_of(row, slots);
                write_row_inputs(row, start, &read, slots, step)?;
                for group in 0..groups {
                    let change = match group.checked_sub(1) {
                        None => first_change(row),
                        Some(further) => further_changes[r * (groups - 1) + further],
                    };
                    let table = slots.tables.row_mut::<i32>(group * seq_slots + seq_slot);
                    update_table(table, change, &read)?;
                    let tokens = row.token as usize..(row.token + row.len) as usize;
                    let to = &mut step.slots.row_mut::<i64>(group)[tokens];
                    write_kv_slots(to, start as usize, table, block_tokens)?;
                }
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
            for group in 0..groups {
                step.slots.row_mut::<i64>(group)[t] = -1;
            }
        }
        for q in 0..stage.logits_rows {
            let token = read.logits_rows.get(q).map_or(0, |row| row.token.max(0));
            step.logits_indices.row_mut::<i32>(0)[q] = token;
        }
        Ok(())
    }
}

/// Samples the logits rows of a staged step with `sample`, stores the results in `outputs`, and updates the
/// latest token and the token history of each sequence slot.
fn sample_and_store(
    logits: MatRef<'_>,
    stage: &StagingBufferView<'_>,
    prepared: &PreparedStep<'_>,
    slots: &mut SequenceSlotArrays<'_>,
    outputs: &mut SamplerOutputArrays<'_>,
    sample: impl FnOnce(MatRef<'_>, &[SampleRequest<'_>]) -> Result<Vec<RowSampleResult>, DeviceError>,
) -> Result<(), DeviceError> {
    check_dtype("sample_rows", "logits", logits.dtype(), DType::F32)?;
    let read = StagingReader::new(stage.bytes)?;
    let logits_rows = &read.logits_rows[..read.logits_rows.len().min(logits.rows())];
    check_size("sample_rows", "words of a sampled token", outputs.sampled.cols(), SAMPLE_WORDS)?;
    let rules: Vec<RowSamplingParams> = logits_rows
        .iter()
        .map(|row| RowSamplingParams::new(row, &read, prepared, slots))
        .collect::<Result<_, _>>()?;
    let requests: Vec<SampleRequest<'_>> =
        logits_rows.iter().zip(&rules).map(|(row, rules)| rules.request(row)).collect();
    let results = sample(logits.rows_from(0, logits_rows.len()), &requests)?;
    for (i, (row, result)) in logits_rows.iter().zip(results).enumerate() {
        let mut sampled = write_sample(i, row, result, outputs);
        if row.token >= 0 && row.known_token < 0 {
            update_latest_token(row, rules[i].position, &mut sampled, prepared, slots);
        }
        // SAFETY: the record is exactly SAMPLE_WORDS words without padding.
        let words: [i32; SAMPLE_WORDS] = unsafe { std::mem::transmute(sampled) };
        outputs.sampled.row_mut::<i32>(i).copy_from_slice(&words);
    }
    Ok(())
}

/// Initialises a sequence slot for a new request: token history, allowed ids and sampling parameters.
fn init_sequence(
    init: &StagedSequenceInit,
    read: &StagingReader<'_>,
    slots: &mut SequenceSlotArrays<'_>,
) -> Result<(), DeviceError> {
    let seq_slot = index("sequence slot", init.seq_slot, slots.params.rows())?;
    let history = read.words(init.history_at, init.history_len)?;
    let from = init.history_from.max(0) as usize;
    let row = slots.history.row_mut::<i32>(seq_slot);
    index("history", (from + history.len()) as i32, row.len() + 1)?;
    row[from..from + history.len()].copy_from_slice(history);
    if init.mask_at >= 0 {
        let mask = slots.masks.row_mut::<i32>(seq_slot);
        mask.copy_from_slice(read.words(init.mask_at, mask.len() as i32)?);
    }
    // SAFETY: the record is exactly PARAMS_WORDS words without padding.
    let words: [i32; PARAMS_WORDS] = unsafe { std::mem::transmute(init.params) };
    slots.params.row_mut::<i32>(seq_slot).copy_from_slice(&words);
    Ok(())
}

fn sampling_params(slots: &SequenceSlotArrays<'_>, seq_slot: usize) -> SequenceSamplingParams {
    let words = slots.params.as_ref().row::<i32>(seq_slot);
    let words: [i32; PARAMS_WORDS] = std::array::from_fn(|i| words[i]);
    // SAFETY: the record is exactly PARAMS_WORDS words, and any bits are a record.
    unsafe { std::mem::transmute(words) }
}

/// Returns the change of the block table of KV group 0 by a row.
fn first_change(row: &StagedStepRow) -> StagedTableChange {
    StagedTableChange { from: row.table_from, len: row.table_len, at: row.table_at }
}

/// Replaces the changed entries of a block table.
fn update_table(
    table: &mut [i32],
    change: StagedTableChange,
    read: &StagingReader<'_>,
) -> Result<(), DeviceError> {
    let entries = read.words(change.at, change.len)?;
    let from = change.from.max(0) as usize;
    index("table", (from + entries.len()) as i32, table.len() + 1)?;
    table[from..from + entries.len()].copy_from_slice(entries);
    Ok(())
}

/// Writes the KV slots of successive positions from `start` on: position `p` has KV slot `table[p /
/// block_tokens] · block_tokens + p mod block_tokens`.
fn write_kv_slots(
    to: &mut [i64],
    start: usize,
    table: &[i32],
    block_tokens: usize,
) -> Result<(), DeviceError> {
    for (position, slot) in (start..).zip(to) {
        let block = table[index("table", (position / block_tokens) as i32, table.len())?];
        *slot = i64::from(block) * block_tokens as i64 + (position % block_tokens) as i64;
    }
    Ok(())
}

/// Position of the first token of a row. If the host staged token ids, it is `row.start`; otherwise it is
/// computed from the latest token of the sequence slot, with `row.start` as upper bound.
fn start_of(row: &StagedStepRow, slots: &SequenceSlotArrays<'_>) -> i32 {
    if row.ids >= 0 {
        return row.start;
    }
    row.start.min(latest_token_of(slots, row.seq_slot as usize).position - 1 - row.ids)
}

fn latest_token_of(slots: &SequenceSlotArrays<'_>, seq_slot: usize) -> LatestToken {
    let words = slots.latest.as_ref().row::<i32>(seq_slot);
    LatestToken { token: words[0], position: words[1], draft_accepted: words[2] }
}

/// Writes the token ids and positions of a row.
fn write_row_inputs(
    row: &StagedStepRow,
    start: i32,
    read: &StagingReader<'_>,
    slots: &SequenceSlotArrays<'_>,
    step: &mut StepInputArrays<'_>,
) -> Result<(), DeviceError> {
    let latest = latest_token_of(slots, row.seq_slot as usize).token;
    let ids = if row.ids < 0 { &[] } else { read.words(row.ids, row.len)? };
    for i in 0..row.len as usize {
        let (t, position) = (row.token as usize + i, start as usize + i);
        step.ids.row_mut::<i32>(0)[t] = ids.get(i).copied().unwrap_or(latest);
        step.positions.row_mut::<i32>(0)[t] = position as i32;
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

/// Sampling parameters and logit edits of one logits row, collected from the stage and the sequence slot.
struct RowSamplingParams {
    params: SequenceSamplingParams,
    allowed: Option<Vec<u32>>,
    banned: Vec<u32>,
    bias: Vec<(u32, f32)>,
    seen: Vec<TokenOccurrence>,
    /// Sample position: the position of the token to sample.
    position: i32,
}

impl RowSamplingParams {
    fn new(
        row: &StagedLogitsRow,
        read: &StagingReader<'_>,
        prepared: &PreparedStep<'_>,
        slots: &SequenceSlotArrays<'_>,
    ) -> Result<Self, DeviceError> {
        let mut new = Self {
            params: SequenceSamplingParams::default(),
            allowed: None,
            banned: Vec::new(),
            bias: Vec::new(),
            seen: Vec::new(),
            position: 0,
        };
        if row.token < 0 || row.known_token >= 0 {
            return Ok(new); // Padding, or a known token: no rules.
        }
        let seq_slot = index("sequence slot", row.seq_slot, slots.params.rows())?;
        new.params = sampling_params(slots, seq_slot);
        let token = index("token", row.token, prepared.positions.cols())?;
        new.position = prepared.positions.row::<i32>(0)[token] + 1;
        let known_tokens = index("position", new.position, slots.history.cols() + 1)?;
        let history = &slots.history.as_ref().row::<i32>(seq_slot)[..known_tokens];
        if row.mask_words > 0 {
            new.allowed = Some(ids_of(read.words(row.mask_at, row.mask_words)?));
        } else if new.params.flags & RULE_MASKED != 0 {
            new.allowed = Some(ids_of(slots.masks.as_ref().row::<i32>(seq_slot)));
        }
        if new.params.flags & RULE_HISTORY != 0 {
            new.seen = count_occurrences(history, new.params.prompt_len.max(0) as usize);
        }
        let (from, len) = (row.edits_at as usize, row.edits as usize);
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

    fn request(&self, row: &StagedLogitsRow) -> SampleRequest<'_> {
        let params = &self.params;
        let draw = RandomSamplingParams {
            temperature: params.temperature,
            min_p: params.min_p,
            top_k: params.top_k as usize,
            top_p: params.top_p,
            key: params.key,
            position: self.position as u32,
        };
        let edits = LogitEdits {
            allowed: self.allowed.as_deref(),
            banned: &self.banned,
            bias: &self.bias,
            seen: &self.seen,
            repetition: params.repetition,
            frequency: params.frequency,
            presence: params.presence,
        };
        let draw = (params.temperature >= GREEDY_BELOW).then_some(draw);
        let choice = match u32::try_from(row.known_token) {
            Ok(token) => SampleOrScore::Score(token),
            Err(_) => SampleOrScore::Sample(SamplingRules { edits, draw }),
        };
        SampleRequest { choice, logprobs: usize::try_from(row.top).ok() }
    }
}

/// Whether the condition of a logit edit is met for the token after `history`.
fn applies(
    edit: &StagedLogitEdit,
    history: &[i32],
    read: &StagingReader<'_>,
) -> Result<bool, DeviceError> {
    if edit.when_len < 0 {
        return Ok((history.len() as i64) < i64::from(edit.when_at));
    }
    Ok(history.ends_with(read.words(edit.when_at, edit.when_len)?))
}

/// Token ids with a set bit in a bitmask.
fn ids_of(mask: &[i32]) -> Vec<u32> {
    let bits = |(word, bits): (usize, &i32)| {
        let bits = *bits as u32;
        (0..32).filter(move |i| bits >> i & 1 == 1).map(move |i| word as u32 * 32 + i)
    };
    mask.iter().enumerate().flat_map(bits).collect()
}

/// Returns the distinct token ids of `history` in order of first occurrence. The count of each id is its
/// number of occurrences from position `prompt_len` on, in the output.
fn count_occurrences(history: &[i32], prompt_len: usize) -> Vec<TokenOccurrence> {
    let mut seen: Vec<TokenOccurrence> = Vec::new();
    let mut indices = HashMap::new();
    for (position, &id) in history.iter().enumerate() {
        let index = *indices.entry(id).or_insert_with(|| {
            seen.push(TokenOccurrence { id: id as u32, count: 0 });
            seen.len() - 1
        });
        seen[index].count += u32::from(position >= prompt_len);
    }
    seen
}

/// Converts the sampling result of a logits row to a `SampledToken`, and writes its top log-probabilities to
/// `outputs`.
fn write_sample(
    index: usize,
    row: &StagedLogitsRow,
    result: RowSampleResult,
    outputs: &mut SamplerOutputArrays<'_>,
) -> SampledToken {
    let mut sampled = SampledToken { token: -1, ..SampledToken::default() };
    match result {
        _ if row.token < 0 => {}
        Err(SampleError::NonFinite) => sampled.status = SAMPLE_NON_FINITE,
        Err(SampleError::AllMasked) => sampled.status = SAMPLE_ALL_MASKED,
        Ok(result) => {
            sampled.status = SAMPLE_OK;
            sampled.token = result.token as i32;
            if let Some(logprobs) = result.logprobs {
                (sampled.logprob, sampled.rank) = (logprobs.logprob, logprobs.rank);
                let ids = outputs.top_ids.row_mut::<i32>(index);
                for (to, &(id, _)) in ids.iter_mut().zip(&logprobs.top) {
                    *to = id as i32;
                }
                let values = outputs.top_logprobs.row_mut::<f32>(index);
                for (to, &(_, value)) in values.iter_mut().zip(&logprobs.top) {
                    *to = value;
                }
            }
        }
    }
    sampled
}

/// Verifies the draft token at `position`. Stores the sampled token as the latest token of the sequence slot
/// if all draft tokens before it are accepted.
fn update_latest_token(
    row: &StagedLogitsRow,
    position: i32,
    output: &mut SampledToken,
    prepared: &PreparedStep<'_>,
    slots: &mut SequenceSlotArrays<'_>,
) {
    let seq_slot = row.seq_slot as usize;
    let params = sampling_params(slots, seq_slot);
    let previous = latest_token_of(slots, seq_slot);
    let sampled = output.status == SAMPLE_OK;
    let preceding_accepted = row.draft_index == 0 || previous.draft_accepted != 0;
    if sampled && preceding_accepted && row.has_draft != 0 {
        let draft = prepared.ids.row::<i32>(0)[row.token as usize + 1];
        let accepted = match prepared.verification {
            DraftVerification::NoDrafts => false,
            DraftVerification::MatchSampled => draft == output.token,
            DraftVerification::Synthetic { per_mille, decrease } => {
                let chance = i32::from(per_mille) - i32::from(decrease) * row.draft_index;
                acceptance_noise(params.key, position as u32) * 1000.0 < chance as f32
            }
        };
        if accepted {
            (output.token, output.status) = (draft, SAMPLE_DRAFT_ACCEPTED);
        }
    }
    if sampled
        && params.flags & RULE_HISTORY != 0
        && let Some(entry) = slots.history.row_mut::<i32>(seq_slot).get_mut(position as usize)
    {
        *entry = output.token;
    }
    let mut latest = previous;
    if preceding_accepted && (sampled || row.draft_index == 0) {
        // If sampling fails after a draft token (`draft_index > 0`), this branch is not taken, and the
        // previous token remains the latest token.
        latest = LatestToken {
            token: if sampled { output.token } else { 0 },
            position,
            draft_accepted: 0,
        };
    }
    latest.draft_accepted = i32::from(output.status == SAMPLE_DRAFT_ACCEPTED);
    let words = [latest.token, latest.position, latest.draft_accepted];
    slots.latest.row_mut::<i32>(seq_slot).copy_from_slice(&words);
}
