//! Limits of a step; checks the rows of a batch against them and stages the rows.

use super::row_facts::{StagedRowPart, row_facts};
use crate::BatchError;
use crate::sequence_slots::{BlockTableChange, HostSequenceSlots, HostSequenceState};
use ops::{ReplayShape, StagedStepRow, StagedTableChange, StagingBuffer};
use protocol::{Batch, BatchRow, RowInput, SpeculativeConfig, Token};

/// Limits of a step, fixed when the executor starts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLimits {
    /// Maximum number of tokens per step.
    pub(crate) tokens: usize,
    /// Maximum number of rows per step.
    pub(crate) rows: usize,
    /// Number of positions per KV block.
    pub(crate) block_tokens: u32,
    /// Number of KV groups, each with its own block tables.
    pub(crate) groups: usize,
    /// Maximum number of block table entries of all KV groups that one row replaces.
    pub(crate) table_update_entries: usize,
    /// Number of state slots; 0 = the model has no recurrent state.
    pub(crate) state_slots: usize,
    /// Number of token ids in the vocabulary.
    pub(crate) vocab: usize,
    /// Number of channels of the hidden states that draft passes read.
    pub(crate) hidden: usize,
    /// Speculative decoding settings, if configured.
    pub(crate) speculation: Option<SpeculativeConfig>,
    /// Whether rows with draft tokens are split into one-token rows, which captured graphs require.
    pub(crate) split_decode_rows: bool,
}

impl StepLimits {
    /// Maximum number of 32-bit words that are staged at once: the token ids and block tables of a step with
    /// a few sequence slot initialisations (token history, bitmask), or the bitmasks of `logits_rows` logits
    /// rows. `longest`: number of tokens of the longest request.
    pub(crate) fn stage_words(&self, longest: usize, logits_rows: usize) -> usize {
        let (tables, mask) = (self.rows * self.table_update_entries, self.vocab.div_ceil(32));
        let drafts = if self.speculation.is_some() { self.tokens } else { 0 }; // Also staged as token history.
        let words = self.tokens + drafts + tables + 4 * (longest + mask);
        words.max((self.rows * self.tokens_per_row()).min(logits_rows) * mask)
    }

    /// Maximum number of tokens in a decode row: the input token and the draft tokens.
    pub(crate) fn tokens_per_row(&self) -> usize {
        1 + self.speculation.map_or(0, |speculation| usize::from(speculation.draft_tokens))
    }

    /// Maximum number of rows that are staged for a step: its batch rows or, with `split_decode_rows`, the
    /// one-token rows into which its batch rows are split.
    pub(crate) fn stage_rows(&self) -> usize {
        if self.split_decode_rows {
            (self.rows * self.tokens_per_row()).min(self.tokens.max(self.rows))
        } else {
            self.rows
        }
    }

    /// Maximum number of rows with draft tokens whose recurrent states are updated after sampling, and of the leading
    /// tokens of a step that include all their tokens.
    pub(crate) fn replay(&self) -> ReplayShape {
        if self.state_slots == 0 || self.speculation.is_none() {
            return ReplayShape::default();
        }
        let tokens = (self.rows * self.tokens_per_row()).min(self.tokens);
        ReplayShape { rows: self.rows, tokens }
    }

    /// Returns an error for a batch with more tokens or rows than the limits of a step. In a lockstep group
    /// (`lockstep`), also returns an error if `moe_tokens` is less than the batch's number of tokens, if
    /// `draft_rows` is less than its number of rows up to the last row with draft tokens, or if `moe_tokens`
    /// or `draft_rows` exceeds the limits.
    pub(crate) fn check(&self, batch: &Batch, lockstep: bool) -> Result<(), BatchError> {
        let row_tokens = |row: &BatchRow| row.len as usize + usize::from(row.drafts);
        let tokens = batch.rows.iter().map(row_tokens).sum();
        if tokens > self.tokens {
            return Err(BatchError::TooManyTokens { tokens, limit: self.tokens });
        }
        if batch.rows.len() > self.rows {
            return Err(BatchError::TooManyRows { rows: batch.rows.len(), limit: self.rows });
        }
        let capacity = batch.moe_tokens as usize;
        if lockstep && !(tokens.max(1)..=self.tokens).contains(&capacity) {
            return Err(BatchError::MoeTokenBudget { capacity, tokens, limit: self.tokens });
        }
        let drafting = batch.rows.iter().rposition(|row| row.drafts > 0).map_or(0, |last| last + 1);
        let (rows, capacity) = (drafting as u32, batch.draft_rows);
        if lockstep && (rows > capacity || capacity as usize > self.rows) {
            return Err(BatchError::DraftRowBudget { capacity, rows, limit: self.rows });
        }
        Ok(())
    }

    /// Writes a row and its draft tokens to the staging buffer. `changes` are the row's changes of its block
    /// table in each KV group.
    pub(crate) fn stage_row(
        &self,
        row: &BatchRow,
        changes: &[BlockTableChange],
        slots: &HostSequenceSlots,
        stage: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        self.check_row(row, slots)?;
        let state = slots.get(row.seq_slot);
        let ids = match &row.input {
            RowInput::Tokens(ids) => {
                let placeholders = std::iter::repeat_n(&0, state.device_drafts.into());
                stage.push_words(
                    ids.iter().chain(&state.host_drafts).chain(placeholders).map(|&id| id as i32),
                )
            }
            RowInput::SampledAt { .. } => -1,
        };
        let first_group = stage_change(&changes[0], stage);
        let further_groups = stage.table_changes.len();
        for change in &changes[1..] {
            let change = stage_change(change, stage);
            stage.table_changes.push(change);
        }
        let drafts = state.drafts();
        let staged_rows = if self.split_decode_rows && row.len == 1 { 1 + drafts } else { 1 };
        let len = row.len + drafts + 1 - staged_rows;
        let replay = self.stage_replay(row, drafts, stage)?;
        for i in 0..staged_rows as i32 {
            // A batch row may be staged as several one-token rows. Each of them contains the block table
            // changes of the batch row, because its KV slots are computed from the changed block tables.
            if i > 0 {
                let end = further_groups + changes.len() - 1;
                stage.table_changes.extend_from_within(further_groups..end);
            }
            stage.rows.push(StagedStepRow {
                seq_slot: row.seq_slot.0 as i32,
                start: (row.start + row.input.draft_slack()) as i32 + i,
                len: len as i32,
                token: stage.tokens as i32,
                ids: if ids < 0 { ids - i } else { ids + i },
                table_from: first_group.from,
                table_len: first_group.len,
                table_at: first_group.at,
            });
            let index = i as u32;
            let part = StagedRowPart { index, later: staged_rows - 1 - index, replay };
            stage.facts.extend(row_facts(row, part));
            stage.tokens += len as usize;
        }
        Ok(())
    }

    /// Adds a row with draft tokens to the state updates after sampling, before the row is staged. Returns the number of
    /// these rows so far; 0 if the forward pass writes the state of the row.
    fn stage_replay(
        &self,
        row: &BatchRow,
        drafts: u32,
        stage: &mut StagingBuffer,
    ) -> Result<u32, BatchError> {
        if self.state_slots == 0 || drafts == 0 {
            return Ok(0);
        }
        let (request, limit) = (row.request, self.replay().tokens);
        let tokens = stage.tokens + (row.len + drafts) as usize;
        if tokens > limit {
            return Err(BatchError::DraftsAfterPrefill { request, tokens, limit });
        }
        stage.replay = ReplayShape { rows: stage.replay.rows + 1, tokens };
        Ok(stage.replay.rows as u32)
    }

    fn check_row(&self, row: &BatchRow, slots: &HostSequenceSlots) -> Result<(), BatchError> {
        let (request, state) = (row.request, slots.get(row.seq_slot));
        let limit = self.speculation.map_or(0, |speculation| speculation.draft_tokens);
        if row.drafts > limit {
            return Err(BatchError::TooManyDrafts { request, drafts: row.drafts, limit });
        }
        self.check_states(row)?;
        let token_ids = self.input_token_count(row, state)?;
        if token_ids != row.len as usize || token_ids == 0 {
            return Err(BatchError::Length { request, len: row.len, token_ids });
        }
        let end = u64::from(row.start) + u64::from(row.input.draft_slack()) + u64::from(row.len);
        let last = u32::try_from(end + u64::from(row.drafts) - 1).unwrap_or(u32::MAX);
        for (group, (table, limits)) in state.tables().iter().zip(slots.groups()).enumerate() {
            let entries = table.len;
            if (last / self.block_tokens) as usize >= entries {
                // First position of the row without a block table entry.
                let position = row.start.max(entries as u32 * self.block_tokens);
                return Err(BatchError::TableTooShort { request, group, position, entries });
            }
            let (position, first) = (limits.kind.first_read(row.start), table.first);
            if ((position / self.block_tokens) as usize) < first {
                return Err(BatchError::WindowNotCovered { request, group, position, first });
            }
        }
        Ok(())
    }

    /// Checks the state slots of a row. All layers with recurrent state are in one state group.
    fn check_states(&self, row: &BatchRow) -> Result<(), BatchError> {
        let (request, limit) = (row.request, self.state_slots);
        let (groups, expected) = (row.state_slots.len(), usize::from(limit > 0));
        if groups != expected {
            return Err(BatchError::StateGroups { request, groups, expected });
        }
        for access in &row.state_slots {
            let (read, write) = (access.read.map(|slot| slot.0), access.write.0);
            let is_valid = |slot: u32| (slot as usize) < limit;
            let starts = row.start == 0;
            if !is_valid(write) || read.is_none() != starts || !read.is_none_or(is_valid) {
                return Err(BatchError::StateSlot { request, read, write, limit });
            }
        }
        Ok(())
    }

    /// Number of input tokens that a row has, without draft tokens.
    ///
    /// Errors: an input token or a draft token is not in the vocabulary, or the input token was not sampled.
    fn input_token_count(
        &self,
        row: &BatchRow,
        state: &HostSequenceState,
    ) -> Result<usize, BatchError> {
        let (request, limit) = (row.request, self.vocab);
        match &row.input {
            RowInput::Tokens(ids) => {
                let in_vocab = |token: Token| (token as usize) < limit;
                let mut all = ids.iter().chain(&state.host_drafts);
                match all.find(|&&token| !in_vocab(token)) {
                    Some(&token) => Err(BatchError::Vocabulary { request, token, limit }),
                    None => Ok(ids.len()),
                }
            }
            RowInput::SampledAt { step, .. } if state.has_token_of(*step) => Ok(1),
            RowInput::SampledAt { step, .. } => {
                Err(BatchError::NotSampled { request, step: step.0 })
            }
        }
    }
}

/// Writes the new entries of a block table to the staging buffer, and returns the staged change.
fn stage_change(change: &BlockTableChange, stage: &mut StagingBuffer) -> StagedTableChange {
    let at = stage.push_words(change.blocks.iter().copied());
    StagedTableChange { from: change.from as i32, len: change.blocks.len() as i32, at }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence_slots::BlockTableLimits;
    use protocol::{
        BlockId, BlockTableUpdate, KvGroup, KvKind, KvSpec, RequestId, SamplingParams,
        SequenceInit, SequenceSlot, StateSlot, StateSlotAccess,
    };

    const LIMITS: StepLimits = StepLimits {
        tokens: 16,
        rows: 2,
        block_tokens: 4,
        groups: 2,
        table_update_entries: 16,
        state_slots: 0,
        vocab: 9,
        hidden: 1,
        speculation: None,
        split_decode_rows: true,
    };

    /// Sequence slots of a model with full layers and layers with a window of 8 keys.
    fn slots() -> HostSequenceSlots {
        let kinds = [KvKind::Full, KvKind::Window { tokens: 8 }];
        let group = |kind| KvGroup { layers: vec![0], kind, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: 4, groups: kinds.map(group).into() };
        HostSequenceSlots::new(2, BlockTableLimits::of_groups(&spec, 64, 16, |_| 1), 40)
    }

    /// Writes `blocks` into the block table of a group from entry `first_entry` on.
    fn update(group: u8, first_entry: u32, blocks: &[u32]) -> BlockTableUpdate {
        let blocks = blocks.iter().map(|&block| BlockId(block)).collect();
        BlockTableUpdate { group, first_entry, blocks }
    }

    /// A row of `len` tokens from `start` on.
    fn row(start: u32, len: u32, table_updates: &[BlockTableUpdate]) -> BatchRow {
        let init = SequenceInit {
            sampling: SamplingParams::greedy(),
            rng_key: 1,
            prompt_len: start + len,
            token_history: Vec::new(),
        };
        BatchRow {
            request: RequestId(5),
            epoch: 0,
            seq_slot: SequenceSlot(1),
            start,
            len,
            drafts: 0,
            samples: true,
            masked: false,
            input: RowInput::Tokens(vec![0; len as usize].into()),
            table_updates: table_updates.iter().cloned().collect(),
            state_slots: protocol::ThinVec::new(),
            next_token: None,
            seq_init: Some(Box::new(init)),
        }
    }

    /// Stages rows of one sequence slot, of which the first one initialises it.
    fn stage(rows: &[BatchRow]) -> Result<StagingBuffer, BatchError> {
        let (mut slots, mut stage) = (slots(), StagingBuffer::default());
        for (i, row) in rows.iter().enumerate() {
            let mut row = row.clone();
            row.seq_init = row.seq_init.filter(|_| i == 0);
            let mut changes = Vec::new();
            slots.update(&row, &mut changes)?;
            LIMITS.stage_row(&row, &changes, &slots, &mut stage)?;
        }
        Ok(stage)
    }

    #[test]
    fn rows_stage_table_changes_of_each_group() {
        let whole: &[u32] = &[1, 2, 3, 4, 5, 6];
        // Position 20 reads keys from position 13 on, which are in the table entries from 3 on.
        let first = row(20, 3, &[update(0, 0, whole), update(1, 3, &[13, 14, 15])]);
        let stage =
            stage(&[first, row(23, 2, &[update(1, 6, &[16]), update(0, 6, &[7])])]).unwrap();
        let change = |change: StagedTableChange| {
            (change.from, stage.words[change.at as usize..][..change.len as usize].to_vec())
        };
        let first_group = |row: &StagedStepRow| StagedTableChange {
            from: row.table_from,
            len: row.table_len,
            at: row.table_at,
        };
        let first_groups: Vec<_> = stage.rows.iter().map(|row| change(first_group(row))).collect();
        assert_eq!(first_groups, [(0, vec![1, 2, 3, 4, 5, 6]), (6, vec![7])]);
        let windows: Vec<_> = stage.table_changes.iter().map(|c| change(*c)).collect();
        assert_eq!(windows, [(3, vec![13, 14, 15]), (6, vec![16])]);
    }

    #[test]
    fn tables_must_cover_rows_in_every_group() {
        let error = |rows: &[BatchRow]| stage(rows).unwrap_err().to_string();
        let whole: &[u32] = &[1, 2, 3, 4, 5, 6];
        let short = error(&[row(20, 3, &[update(0, 0, whole), update(1, 3, &[13, 14])])]);
        assert!(short.contains("position 20, its block table of KV group 1 has 5"), "{short}");
        let late = error(&[row(20, 3, &[update(0, 0, whole), update(1, 4, &[14, 15])])]);
        assert!(late.contains("position 13, its block table of KV group 1 begins at"), "{late}");
        let hole = error(&[row(20, 3, &[update(0, 3, &[4, 5, 6]), update(1, 3, &[13, 14, 15])])]);
        assert!(hole.contains("does not fit its block table of KV group 0"), "{hole}");
        let first = row(20, 3, &[update(0, 0, whole), update(1, 3, &[13, 14, 15])]);
        let gap = error(&[first.clone(), row(23, 1, &[update(1, 7, &[17])])]);
        assert!(gap.contains("does not fit its block table of KV group 1"), "{gap}");
        let unknown = error(&[first, row(23, 1, &[update(2, 6, &[17])])]);
        assert!(unknown.contains("KV group 2, the model has 2"), "{unknown}");
        let outside = error(&[row(0, 3, &[update(0, 0, &[1]), update(1, 0, &[40])])]);
        assert!(outside.contains("block 40 is out of range"), "{outside}");
    }

    #[test]
    fn state_slots_must_fit_the_pool() {
        let limits = StepLimits { state_slots: 3, ..LIMITS };
        let check = |start: u32, read: Option<u32>, write: u32| {
            let (read, write) = (read.map(StateSlot), StateSlot(write));
            let access = StateSlotAccess { group: 2, read, write };
            let row = BatchRow { state_slots: [access].into(), ..row(start, 1, &[]) };
            limits.check_states(&row).map_err(|error| error.to_string())
        };
        assert_eq!(check(0, None, 2), Ok(()));
        assert_eq!(check(4, Some(0), 2), Ok(()));
        for (start, read, write) in [(0, None, 3), (4, Some(3), 2), (4, None, 2), (0, Some(1), 1)] {
            let text = check(start, read, write).unwrap_err();
            assert!(text.contains("the pool has 3"), "{text}");
        }
        let text = limits.check_states(&row(4, 1, &[])).unwrap_err().to_string();
        assert!(text.contains("slots of 0 state groups, the model has 1"), "{text}");
    }
}
