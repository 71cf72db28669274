//! A simulated executor that runs batches without a neural network: keys, values and tokens are hashes. It
//! depends on the crate `protocol` alone.
//!
//! The model has KV slots and sequence slots, as a device does, but no reference counts and no scheduling
//! policy. The next token is a hash of the whole prefix **read back through the block table**, KV slot by KV
//! slot, so an aliased, stale, freed or misplaced block gives a wrong token immediately. Window groups are read
//! through their own tables: the KV entries in the window of each query must continue the same prefix. The state slots
//! of state groups contain the hash of all tokens folded into them; a row reads one slot and writes one, and a state
//! that does not continue the row's prefix gives a wrong token. Rows with draft tokens write their states after sampling,
//! without the rejected draft tokens. As on a device, KV entries are read after all rows of
//! the step have written. With `KvSlotAccess::Untouched`, the token is a hash
//! of the request's key and the position, and no KV slot is accessed: steps then take almost no time, for
//! HTTP benchmarks.
//!
//! A batch that no device could run (for example, because a block table has a hole) gives the error
//! `InvalidBatchError`.

#![allow(dead_code, reason = "each test binary uses a part")]

#[path = "hash_language.rs"]
pub(crate) mod text;

use protocol::{
    Batch, BatchRow, BitmaskRow, BlockId, BlockTableUpdate, KvKind, RequestId, RowError, RowInput,
    RowOutput, StateSlot, StateSlotAccess, StepId, StepOutput, StepTiming, Token, TokenBitmask,
};
use text::{EMPTY, HashSampler, POISON, avalanche, entry, fold};

/// Whether the hash model writes and reads KV slots. If it does, the next token depends on their contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KvSlotAccess {
    /// Every KV slot is written and read.
    ReadWrite,
    /// No KV slot is accessed; the next token is a hash of the request's key and the position.
    Untouched,
}

/// Which tokens of a row with draft tokens are folded into its states after sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum StateReplayTokens {
    /// The input token and the accepted draft tokens, as on a device.
    #[default]
    Accepted,
    /// All draft tokens: an injected fault.
    AllDrafts,
    /// The input token alone: an injected fault.
    InputOnly,
}

/// Sizes of a simulated device.
#[derive(Debug, Clone)]
pub(crate) struct HashModelConfig {
    /// Number of KV blocks in the pool.
    pub(crate) blocks: u32,
    /// Number of positions per KV block.
    pub(crate) block_tokens: u32,
    /// Vocabulary size; token ids are in `0 .. vocab`.
    pub(crate) vocab: Token,
    /// Maximum number of draft tokens that the device proposes after a sampled token.
    pub(crate) drafts: u8,
    /// Whether KV slots are written and read.
    pub(crate) slot_access: KvSlotAccess,
    /// Kinds of the KV groups. Groups with blocks use the same pool; state groups follow them.
    pub(crate) kinds: Vec<KvKind>,
    /// Number of state slots of each state group.
    pub(crate) state_slots: u32,
}

impl HashModelConfig {
    /// Number of groups with blocks, which is the index of the first state group.
    fn block_groups(&self) -> usize {
        self.kinds.iter().filter(|kind| !kind.is_state()).count()
    }
}

/// Contents of a KV slot.
#[derive(Debug, Clone, Copy)]
struct HashKvSlot {
    /// KV entry of the token, changed by the number of the group.
    entry: u64,
    /// Context after the token: hash of the KV entries of all positions up to and including its own.
    context: u64,
}

impl HashKvSlot {
    const POISON: Self = Self { entry: POISON, context: POISON };

    /// Contents after `entry` has been written to a slot of `group`.
    fn new(group: usize, entry: u64, context: u64) -> Self {
        Self { entry: entry ^ group_salt(group), context }
    }
}

/// Value that distinguishes the entries of a group; 0 for the first group.
fn group_salt(group: usize) -> u64 {
    (group as u64).wrapping_mul(0xa076_1d64_78bd_642f)
}

/// Error for a batch that no device could run; contains a description of the problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InvalidBatchError(pub(crate) String);

/// A KV block that a row filled completely. Tests compare it with the blocks that the scheduler treats as
/// computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FilledBlock {
    /// Index of the row in its batch.
    pub(crate) row: u32,
    /// End position of the block (exclusive).
    pub(crate) end: u32,
    /// Context at the end of the block: hash of the KV entries of all positions before `end`.
    pub(crate) context: u64,
}

/// Result of an operation on a row; the error means that no device could run the row.
type HashModelResult<T> = Result<T, InvalidBatchError>;

/// State of one sequence slot, in which the device keeps a running request between steps.
#[derive(Debug, Clone)]
struct HashSequenceState {
    request: RequestId,
    epoch: u32,
    sampler: HashSampler,
    /// Block table of each KV group.
    tables: Vec<Vec<BlockId>>,
    /// The last sampled token, whose KV entry is not written yet, and the step that sampled it.
    last: Option<(Token, StepId)>,
    /// Position of the token `last`.
    next: u32,
    /// Sum of the hashes of the tokens processed in this epoch (since the last preemption or executor
    /// restart), for mean pooling.
    pooled_sum: u64,
    /// Draft tokens that the device proposed after `last`; `None` if no token was sampled in this epoch
    /// (since the last preemption or executor restart).
    drafts: Option<Vec<Token>>,
}

/// First position and input ids of a row. If the batch does not contain them, they are taken from the
/// sequence slot.
struct ResolvedRowInput {
    start: u32,
    ids: Vec<Token>,
    /// States before the row, of each state group, if they are written after sampling.
    unwritten_states: Option<Vec<u64>>,
}

/// The simulated device: KV slots and sequence slots of one executor.
#[derive(Debug)]
pub(crate) struct HashModel {
    config: HashModelConfig,
    slots: Vec<HashKvSlot>,
    /// State slots of each state group: the hash of all tokens folded into the state, changed by the number of the
    /// group.
    states: Vec<Vec<u64>>,
    sequence_slots: Vec<Option<HashSequenceState>>,
    filled: Vec<FilledBlock>,
    shifted_rows: u64,
    /// Output tokens of every request, instead of the hashes.
    pub(crate) scripted_output: Option<Vec<Token>>,
    /// Tokens that are folded into the states of rows with draft tokens.
    pub(crate) replay: StateReplayTokens,
}

impl HashModel {
    /// Creates a device whose KV slots have not been written.
    pub(crate) fn new(config: HashModelConfig) -> Self {
        let slots = match config.slot_access {
            KvSlotAccess::ReadWrite => {
                vec![HashKvSlot::POISON; config.blocks as usize * config.block_tokens as usize]
            }
            KvSlotAccess::Untouched => Vec::new(),
        };
        let state_groups = config.kinds.len() - config.block_groups();
        let states = vec![vec![POISON; config.state_slots as usize]; state_groups];
        Self {
            config,
            slots,
            states,
            sequence_slots: Vec::new(),
            filled: Vec::new(),
            shifted_rows: 0,
            scripted_output: None,
            replay: StateReplayTokens::default(),
        }
    }

    /// Fills the KV slots of a freed block with `POISON`, so that reads of stale entries give wrong tokens.
    /// Blocks must be poisoned in the order in which the scheduler's messages were sent.
    pub(crate) fn poison(&mut self, block: BlockId) {
        let size = self.config.block_tokens as usize;
        let from = block.0 as usize * size;
        if let Some(slots) = self.slots.get_mut(from..from + size) {
            slots.fill(HashKvSlot::POISON);
        }
    }

    /// Overwrites a state slot that no request references any more; `group` counts state groups from 0.
    pub(crate) fn poison_state(&mut self, group: usize, slot: StateSlot) {
        if let Some(state) = self.states[group].get_mut(slot.0 as usize) {
            *state = POISON;
        }
    }

    /// Returns the blocks that the last step filled, except blocks of failed rows and blocks that contain
    /// rejected draft tokens.
    pub(crate) fn filled(&self) -> &[FilledBlock] {
        &self.filled
    }

    /// Returns the number of rows of the last step that started at a later position than planned (`start`),
    /// because draft tokens were accepted in a step that was in flight when the row was planned.
    pub(crate) fn shifted_rows(&self) -> u64 {
        self.shifted_rows
    }

    /// Returns the draft tokens in the sequence slot of a row that the row verifies.
    pub(crate) fn drafts(&self, row: &BatchRow) -> &[Token] {
        let sequence = self.sequence_slots.get(row.seq_slot.0 as usize).and_then(Option::as_ref);
        let drafts = sequence.and_then(|sequence| sequence.drafts.as_deref()).unwrap_or_default();
        &drafts[..drafts.len().min(row.drafts.into())]
    }

    /// Runs one step whose batch has no rows with grammar bitmasks.
    pub(crate) fn run(&mut self, batch: &Batch) -> HashModelResult<StepOutput> {
        self.run_with(batch, &[], |_| None)
    }

    /// Runs one step. `masks` contains the grammar bitmasks of its constrained rows. A row for which `fails`
    /// returns an error fails as with NaN logits: its KV entries are set to `POISON`, and it returns no
    /// token.
    pub(crate) fn run_with(
        &mut self,
        batch: &Batch,
        masks: &[BitmaskRow],
        fails: impl Fn(&BatchRow) -> Option<RowError>,
    ) -> HashModelResult<StepOutput> {
        let mut spans = Vec::with_capacity(batch.rows.len());
        let mut rows = vec![RowOutput::default(); batch.rows.len()];
        self.filled.clear();
        self.shifted_rows = 0;
        for (index, (row, output)) in batch.rows.iter().zip(&mut rows).enumerate() {
            self.start_sequence(row)?;
            let mut span = self.span(row)?;
            self.shifted_rows += u64::from(span.start > row.start);
            output.error = fails(row);
            if self.config.slot_access == KvSlotAccess::ReadWrite {
                self.write(index as u32, row, &mut span, output)?;
            }
            spans.push(span);
        }
        for (index, ((row, span), output)) in
            (0..).zip(batch.rows.iter().zip(&spans).zip(&mut rows))
        {
            let found = masks.iter().find(|mask| mask.row == index);
            let mask = found.map(|mask| &mask.bitmasks[..]);
            if mask.is_some() != row.masked {
                return fail(row, format_args!("masked {}, mask {mask:?}", row.masked));
            }
            if found.is_some_and(BitmaskRow::is_overdue) {
                output.error.get_or_insert(RowError::MaskOverdue);
            }
            match output.error {
                Some(_) => {
                    let drafts = self.config.drafts;
                    self.sequence_mut(row)?.invalidate_last(
                        batch.step,
                        span.start + row.len,
                        drafts,
                    );
                }
                None if row.samples => self.sample(batch.step, row, mask, span, output)?,
                None => self.pool(row, span, output)?,
            }
            self.replay_states(row, span, output);
        }
        // A block that contains KV entries of rejected draft tokens does not count as filled, because these
        // entries will be overwritten.
        self.filled.retain(|filled| {
            let (row, span) = (&batch.rows[filled.row as usize], &spans[filled.row as usize]);
            let accepted = u32::from(rows[filled.row as usize].accepted);
            filled.end <= span.start + row.len + accepted
        });
        let (timing, experts) = (StepTiming::default(), Vec::new());
        Ok(StepOutput {
            step: batch.step,
            epoch: batch.epoch,
            rows,
            timing,
            expert_tokens: experts,
        })
    }

    /// If this is the first row of a request, also after a preemption or executor restart, initialises the
    /// sequence slot. Applies the row's block table updates.
    fn start_sequence(&mut self, row: &BatchRow) -> HashModelResult<()> {
        let index = row.seq_slot.0 as usize;
        if index >= self.sequence_slots.len() {
            self.sequence_slots.resize_with(index + 1, || None);
        }
        if let Some(init) = &row.seq_init {
            let (sampling, vocab) = (init.sampling.clone(), self.config.vocab);
            let mut sampler = HashSampler::new(vocab, sampling, init.rng_key, init.prompt_len);
            sampler.observe(&init.token_history);
            self.sequence_slots[index] = Some(HashSequenceState {
                request: row.request,
                epoch: row.epoch,
                sampler,
                tables: vec![Vec::new(); self.config.kinds.len()],
                last: None,
                next: 0,
                pooled_sum: 0,
                drafts: None,
            });
        }
        let Self { config, sequence_slots, .. } = self;
        let sequence = sequence_of_mut(sequence_slots, row)?;
        row.table_updates.iter().try_for_each(|update| sequence.update_table(config, update, row))
    }

    /// Returns the first position and the input ids of a row, from the batch or from the sequence slot.
    fn span(&mut self, row: &BatchRow) -> HashModelResult<ResolvedRowInput> {
        let sequence = self.sequence_mut(row)?;
        let (start, mut ids) = match (&row.input, sequence.last) {
            (RowInput::Tokens(ids), _) if ids.len() == row.len as usize => {
                (row.start, ids.to_vec())
            }
            (RowInput::SampledAt { step, .. }, Some((token, at)))
                if at == *step && row.len == 1 =>
            {
                (sequence.next, vec![token])
            }
            (input, last) => {
                return fail(
                    row,
                    format_args!("input {input:?} with slot state {last:?}, len {}", row.len),
                );
            }
        };
        let slack = row.input.draft_slack();
        if !(row.start..=row.start + slack).contains(&start) {
            return fail(row, format_args!("starts at {start}, draft slack {slack}"));
        }
        if row.drafts > 0 {
            let Some(drafts) = &sequence.drafts else {
                return fail(row, format_args!("{} draft tokens of an idle slot", row.drafts));
            };
            ids.extend(drafts.iter().take(row.drafts.into()));
        }
        Ok(ResolvedRowInput { start, ids, unwritten_states: None })
    }

    /// Returns the states that a row reads from its state slots, one for each state group.
    fn read_states(&self, row: &BatchRow, start: u32) -> HashModelResult<Vec<u64>> {
        let (first, groups) = (self.config.block_groups(), self.states.len());
        if row.state_slots.len() != groups {
            return fail(row, format_args!("{:?} for {groups} state groups", row.state_slots));
        }
        let read = |(index, access): (usize, &StateSlotAccess)| {
            let slots = &self.states[index];
            let is_valid = usize::from(access.group) == first + index
                && access.read.is_some() == (start > 0)
                && slots.len() > access.write.0 as usize;
            match access.read.map(|slot| slots.get(slot.0 as usize)) {
                None if is_valid => Ok(EMPTY),
                Some(Some(state)) if is_valid => Ok(state ^ group_salt(first + index)),
                _ => fail(row, format_args!("{access:?} of {} state slots", slots.len())),
            }
        };
        row.state_slots.iter().enumerate().map(read).collect()
    }

    /// Writes the states after a row to its state slots.
    fn write_states(&mut self, row: &BatchRow, states: &[u64], failed: bool) {
        let first = self.config.block_groups();
        for (index, (access, &state)) in row.state_slots.iter().zip(states).enumerate() {
            let state = if failed { POISON } else { state ^ group_salt(first + index) };
            self.states[index][access.write.0 as usize] = state;
        }
    }

    /// Folds the newest token and the accepted draft tokens of a row with draft tokens into its states, after sampling. A
    /// row that has sampled no token leaves its states unchanged.
    fn replay_states(&mut self, row: &BatchRow, span: &ResolvedRowInput, output: &RowOutput) {
        let Some(states) = &span.unwritten_states else { return };
        if output.error == Some(RowError::MaskOverdue) {
            return;
        }
        let known = row.len as usize;
        let tokens = match self.replay {
            StateReplayTokens::Accepted => known + usize::from(output.accepted),
            StateReplayTokens::AllDrafts => span.ids.len(),
            StateReplayTokens::InputOnly => known,
        };
        let folded = |state: &u64| {
            span.ids[..tokens].iter().fold(*state, |state, &id| fold(state, entry(state, id)))
        };
        let states: Vec<u64> = states.iter().map(folded).collect();
        self.write_states(row, &states, output.error.is_some());
    }

    /// Writes the KV entries of a row's input ids, and the states after the row. Adds the prompt log-probabilities of the row to `output`,
    /// if requested.
    fn write(
        &mut self,
        index: u32,
        row: &BatchRow,
        span: &mut ResolvedRowInput,
        output: &mut RowOutput,
    ) -> HashModelResult<()> {
        let mut states = self.read_states(row, span.start)?;
        let has_drafts = span.ids.len() > row.len as usize;
        span.unwritten_states = has_drafts.then(|| states.clone());
        let Self { config, slots, sequence_slots, filled, .. } = self;
        let sequence = sequence_of(sequence_slots, row)?;
        let wanted = sequence.sampler.sampling.prompt_logprobs;
        let failed = output.error.is_some();
        let mut context = read(slots, sequence, config, span.start, span.start, row)?;
        for state in &states {
            if *state != context {
                context = avalanche(context ^ state);
            }
        }
        for (i, &id) in span.ids.iter().enumerate() {
            let position = span.start + i as u32;
            let value = entry(context, id);
            context = fold(context, value);
            for state in &mut states {
                *state = fold(*state, entry(*state, id));
            }
            for group in 0..config.block_groups() {
                let slot = slot(&sequence.tables[group], config, position, row)?;
                slots[slot] = if failed {
                    HashKvSlot::POISON
                } else {
                    HashKvSlot::new(group, value, context)
                };
            }
            if (position + 1).is_multiple_of(config.block_tokens) && !failed {
                filled.push(FilledBlock { row: index, end: position + 1, context });
            }
            let of_prompt = position + 1 < sequence.sampler.prompt_len;
            if let (Some(top), true, false) = (wanted, of_prompt, failed) {
                let Some(next) = span.ids.get(i + 1).copied().or(row.next_token) else {
                    return fail(
                        row,
                        format_args!("next token of prompt position {} is missing", position + 1),
                    );
                };
                output.prompt_mut().logprobs.push(text::logprobs(context, next, top, config.vocab));
            }
        }
        if !has_drafts {
            self.write_states(row, &states, failed);
        }
        Ok(())
    }

    /// Samples at the end of a row, verifies its draft tokens, and proposes draft tokens for the next row. A
    /// row with grammar bitmasks samples at most one token per bitmask.
    fn sample(
        &mut self,
        step: StepId,
        row: &BatchRow,
        masks: Option<&[TokenBitmask]>,
        span: &ResolvedRowInput,
        output: &mut RowOutput,
    ) -> HashModelResult<()> {
        let Self { config, slots, sequence_slots, scripted_output, .. } = self;
        let sequence = sequence_of_mut(sequence_slots, row)?;
        let first = span.start + row.len; // This is the position of the first token that the row emits.
        let mut context = match config.slot_access {
            KvSlotAccess::ReadWrite => read(slots, sequence, config, first, first - 1, row)?,
            KvSlotAccess::Untouched => {
                avalanche(sequence.sampler.key ^ avalanche(u64::from(first)))
            }
        };
        let wanted = sequence.sampler.sampling.logprobs;
        output.drafted = (span.ids.len() - row.len as usize) as u8;
        let positions = masks.map_or(usize::MAX, <[_]>::len).min(1 + usize::from(row.drafts));
        for i in 0..positions {
            let mask = masks.map(|masks| &masks[i].words[..]);
            let position = first + i as u32;
            let output_index = position.saturating_sub(sequence.sampler.prompt_len) as usize;
            let scripted = scripted_output
                .as_ref()
                .and_then(|scripted_output| scripted_output.get(output_index).copied());
            let scripted = scripted.filter(|&id| mask.is_none_or(|mask| text::allows(mask, id)));
            let Some(token) = scripted.or_else(|| sequence.sampler.next(context, position, mask))
            else {
                if i > 0 {
                    // The tokens sampled at earlier positions of this row are valid. The next row of the
                    // request will report the error.
                    output.accepted -= 1;
                    break;
                }
                *output = RowOutput { error: Some(RowError::AllMasked), ..RowOutput::default() };
                sequence.invalidate_last(step, position, config.drafts);
                return Ok(());
            };
            output.sampled_tokens.push(token);
            output.logprobs.extend(wanted.map(|n| text::logprobs(context, token, n, config.vocab)));
            sequence.sampler.observe(&[token]);
            sequence.last = Some((token, step));
            sequence.next = position;
            if span.ids.get(row.len as usize + i) != Some(&token) || i + 1 == positions {
                break;
            }
            output.accepted += 1;
            let slot = slot(&sequence.tables[0], config, position, row)?;
            context = fold(context, slots.get(slot).map_or(0, |slot| slot.entry));
        }
        sequence.draft(context, config.drafts);
        Ok(())
    }

    /// Adds the tokens of a row to the pooling state of its request. At the end of the prompt, writes the
    /// result of pooling to `output`.
    fn pool(
        &mut self,
        row: &BatchRow,
        span: &ResolvedRowInput,
        output: &mut RowOutput,
    ) -> HashModelResult<()> {
        let Self { config, slots, sequence_slots, .. } = self;
        let sequence = sequence_of_mut(sequence_slots, row)?;
        let Some(method) = sequence.sampler.sampling.pooling.clone() else { return Ok(()) };
        let mut context = match config.slot_access {
            KvSlotAccess::ReadWrite => read(slots, sequence, config, span.start, span.start, row)?,
            KvSlotAccess::Untouched => EMPTY,
        };
        for &id in &span.ids {
            context = fold(context, entry(context, id));
            sequence.pooled_sum = sequence.pooled_sum.wrapping_add(avalanche(context));
        }
        if span.start + row.len == sequence.sampler.prompt_len {
            let hash = if method.reads_every_token() { sequence.pooled_sum } else { context };
            let count = text::pooled_count(&method);
            output.prompt_mut().pooled = text::pooled(hash, count).into_iter().collect();
        }
        Ok(())
    }

    /// Returns the state of a row's sequence slot. Returns an error if the slot belongs to another request,
    /// or to another epoch of the request (the epoch changes when the request is preempted or its executor
    /// restarts).
    fn sequence_mut(&mut self, row: &BatchRow) -> HashModelResult<&mut HashSequenceState> {
        sequence_of_mut(&mut self.sequence_slots, row)
    }
}

impl HashSequenceState {
    /// Applies a block table update. In a window group, entries below the first one are never read and may be
    /// missing.
    fn update_table(
        &mut self,
        config: &HashModelConfig,
        update: &BlockTableUpdate,
        row: &BatchRow,
    ) -> HashModelResult<()> {
        let (group, from, blocks) =
            (usize::from(update.group), update.first_entry as usize, config.blocks);
        let Some(table) = self.tables[..config.block_groups()].get_mut(group) else {
            return fail(row, format_args!("table update {update:?} of an unknown group"));
        };
        let may_begin_later = config.kinds[group].window().is_some() && table.is_empty();
        if from > table.len() && !may_begin_later {
            return fail(row, format_args!("table update {update:?} leaves a hole"));
        }
        if update.blocks.iter().any(|b| b.0 >= blocks) {
            return fail(row, format_args!("table update {update:?} leaves the pool of {blocks}"));
        }
        table.resize(from, BlockId::NULL);
        table.extend_from_slice(&update.blocks);
        Ok(())
    }

    /// Sets an invalid last token and invalid draft tokens after a failed row, because a row of a later step
    /// that is already in flight may still read the sequence slot.
    fn invalidate_last(&mut self, step: StepId, next: u32, drafts: u8) {
        self.last = Some((0, step));
        self.next = next;
        self.draft(POISON, drafts);
    }

    /// Proposes draft tokens. About two thirds are the tokens that the model will sample; the others are
    /// wrong, to cause rejections. Sometimes proposes fewer than `max_drafts` tokens, as an n-gram proposer
    /// does without a match.
    fn draft(&mut self, mut context: u64, max_drafts: u8) {
        let mut drafts = self.drafts.take().unwrap_or_default();
        drafts.clear();
        let (mut token, mut sampler) =
            (self.last.map_or(0, |(token, _)| token), self.sampler.clone());
        let bits = avalanche(context ^ 2);
        let count = if bits.is_multiple_of(4) {
            bits % (u64::from(max_drafts) + 1)
        } else {
            max_drafts.into()
        };
        for i in 1..=count as u32 {
            context = fold(context, entry(context, token));
            let Some(mut draft_token) = sampler.next(context, self.next + i, None) else { break };
            if avalanche(context ^ 1).is_multiple_of(3) {
                draft_token = (draft_token + 1) % sampler.vocab;
            }
            sampler.observe(&[draft_token]);
            drafts.push(draft_token);
            token = draft_token;
        }
        self.drafts = Some(drafts);
    }
}

/// Returns the context at position `end`: the hash of the KV entries of positions `[0, end)`, read KV slot by
/// KV slot through the block table of the first group. Without a group that keeps all positions, it is read from
/// the slot of the last position.
///
/// The slots of each window group that the query at position `query` reads must contain the last of these
/// entries; otherwise the result is a wrong context.
fn read(
    slots: &[HashKvSlot],
    sequence: &HashSequenceState,
    config: &HashModelConfig,
    end: u32,
    query: u32,
    row: &BatchRow,
) -> HashModelResult<u64> {
    let context = match (config.kinds[0].window(), end) {
        (_, 0) => EMPTY,
        (None, _) => read_all(slots, &sequence.tables[0], config, end, row)?,
        (Some(_), _) => slots[slot(&sequence.tables[0], config, end - 1, row)?].context,
    };
    for (group, kind) in config.kinds.iter().enumerate().filter(|(_, k)| k.window().is_some()) {
        let mut before = None;
        for position in kind.first_read(query)..end {
            let read = slots[slot(&sequence.tables[group], config, position, row)?];
            let after = before.map(|before| fold(before, read.entry ^ group_salt(group)));
            if after.is_some_and(|after| after != read.context) {
                return Ok(avalanche(context ^ read.context));
            }
            before = Some(read.context);
        }
        if before.is_some_and(|before| before != context) {
            return Ok(avalanche(context));
        }
    }
    Ok(context)
}

fn read_all(
    slots: &[HashKvSlot],
    table: &[BlockId],
    config: &HashModelConfig,
    end: u32,
    row: &BatchRow,
) -> HashModelResult<u64> {
    let size = config.block_tokens as usize;
    let mut left = end as usize;
    let mut context = EMPTY;
    for block in table {
        if left == 0 {
            break;
        }
        let from = block.0 as usize * size;
        let count = left.min(size);
        context = slots[from..from + count].iter().fold(context, |c, slot| fold(c, slot.entry));
        left -= count;
    }
    if left > 0 {
        return fail(
            row,
            format_args!("reads {end} positions, table covers {}", end as usize - left),
        );
    }
    Ok(context)
}

/// Returns the index of the KV slot that a block table assigns to a position.
fn slot(
    table: &[BlockId],
    config: &HashModelConfig,
    position: u32,
    row: &BatchRow,
) -> HashModelResult<usize> {
    let size = config.block_tokens;
    match table.get((position / size) as usize) {
        Some(&BlockId::NULL) => fail(row, format_args!("position {position} has no block")),
        Some(block) => Ok((block.0 * size + position % size) as usize),
        None => fail(
            row,
            format_args!("position {position} is outside a block table of {}", table.len()),
        ),
    }
}

fn sequence_of<'a>(
    sequence_slots: &'a [Option<HashSequenceState>],
    row: &BatchRow,
) -> HashModelResult<&'a HashSequenceState> {
    match sequence_slots.get(row.seq_slot.0 as usize).and_then(Option::as_ref) {
        Some(sequence) if (sequence.request, sequence.epoch) == (row.request, row.epoch) => {
            Ok(sequence)
        }
        other => {
            fail(row, format_args!("slot belongs to {:?}", other.map(|s| (s.request, s.epoch))))
        }
    }
}

fn sequence_of_mut<'a>(
    sequence_slots: &'a mut [Option<HashSequenceState>],
    row: &BatchRow,
) -> HashModelResult<&'a mut HashSequenceState> {
    sequence_of(sequence_slots, row)?;
    sequence_slots
        .get_mut(row.seq_slot.0 as usize)
        .and_then(Option::as_mut)
        .ok_or_else(|| InvalidBatchError("slot is free".into()))
}

fn fail<T>(row: &BatchRow, text: std::fmt::Arguments<'_>) -> HashModelResult<T> {
    let BatchRow { request, epoch, seq_slot, start, len, .. } = row;
    Err(InvalidBatchError(format!(
        "request {}.{epoch} slot {} [{start}, {start} + {len}): {text}",
        request.0, seq_slot.0
    )))
}

/// Link of an executor thread that runs the hash model.
pub(crate) mod thread {
    use protocol::link::{InProcessLink, LinkError, MessageLink};
    use protocol::{Batch, BitmaskRow, ExecutorCommand, ExecutorEvent};
    use std::collections::VecDeque;
    use std::time::Duration;

    /// Link from the executor to the engine. While the executor waits for grammar bitmasks, other commands
    /// are queued.
    pub(crate) struct BufferedExecutorLink {
        link: InProcessLink<ExecutorEvent, ExecutorCommand>,
        queued: VecDeque<ExecutorCommand>,
    }

    impl BufferedExecutorLink {
        pub(crate) fn new(link: InProcessLink<ExecutorEvent, ExecutorCommand>) -> Self {
            Self { link, queued: VecDeque::new() }
        }

        pub(crate) fn send(&mut self, message: ExecutorEvent) -> Result<(), LinkError> {
            self.link.send(message)
        }

        pub(crate) fn next(&mut self) -> Result<Option<ExecutorCommand>, LinkError> {
            match self.queued.pop_front() {
                Some(command) => Ok(Some(command)),
                None => self.link.recv(Duration::from_hours(1)),
            }
        }

        /// Waits for the grammar bitmasks of a batch's constrained rows, and returns them.
        pub(crate) fn masks(&mut self, batch: &Batch) -> Result<Vec<BitmaskRow>, LinkError> {
            let wanted = batch.rows.iter().filter(|row| row.masked).count();
            let mut rows = Vec::new();
            let mut deferred = VecDeque::new();
            while rows.len() < wanted {
                match self.next()? {
                    Some(ExecutorCommand::Bitmask(mask)) if mask.step == batch.step => {
                        rows.extend(mask.rows);
                    }
                    Some(ExecutorCommand::Bitmask(mask)) if mask.step < batch.step => {}
                    other => deferred.extend(other),
                }
            }
            deferred.append(&mut self.queued);
            self.queued = deferred;
            Ok(rows)
        }
    }
}
