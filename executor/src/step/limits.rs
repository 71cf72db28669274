//! Limits of a step; checks the rows of a batch against them and stages the rows.

use super::row_facts::row_facts;
use crate::BatchError;
use crate::sequence_slots::{BlockTableChange, HostSequenceSlots, HostSequenceState};
use ops::{StagedStepRow, StagingBuffer};
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
    /// Maximum number of entries in a block table.
    pub(crate) table_width: usize,
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
        let (tables, mask) = (self.rows * self.table_width, self.vocab.div_ceil(32));
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

    /// Writes a row and its draft tokens to the staging buffer. `change` is the row's change of its block
    /// table.
    pub(crate) fn stage_row(
        &self,
        row: &BatchRow,
        change: BlockTableChange,
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
        let (table_from, table_len) = (change.from as i32, change.blocks.len() as i32);
        let table_at = stage.push_words(change.blocks);
        let drafts = state.drafts();
        let staged_rows = if self.split_decode_rows && row.len == 1 { 1 + drafts } else { 1 };
        let len = row.len + drafts + 1 - staged_rows;
        for i in 0..staged_rows as i32 {
            // A batch row may be staged as several one-token rows. Each of them contains the block table
            // change of the batch row, because its KV slots are computed from the changed block table.
            stage.rows.push(StagedStepRow {
                seq_slot: row.seq_slot.0 as i32,
                start: (row.start + row.input.draft_slack()) as i32 + i,
                len: len as i32,
                token: stage.tokens as i32,
                ids: if ids < 0 { ids - i } else { ids + i },
                table_from,
                table_len,
                table_at,
            });
            stage.facts.extend(row_facts(row, i as u32));
            stage.tokens += len as usize;
        }
        Ok(())
    }

    fn check_row(&self, row: &BatchRow, slots: &HostSequenceSlots) -> Result<(), BatchError> {
        let (request, state) = (row.request, slots.get(row.seq_slot));
        let limit = self.speculation.map_or(0, |speculation| speculation.draft_tokens);
        if row.drafts > limit {
            return Err(BatchError::TooManyDrafts { request, drafts: row.drafts, limit });
        }
        let token_ids = self.input_token_count(row, state)?;
        if token_ids != row.len as usize || token_ids == 0 {
            return Err(BatchError::Length { request, len: row.len, token_ids });
        }
        let entries = state.table_len();
        let last = row.start + row.input.draft_slack() + row.len + u32::from(row.drafts) - 1;
        if (last / self.block_tokens) as usize >= entries {
            // First position of the row without a block table entry.
            let position = row.start.max(entries as u32 * self.block_tokens);
            return Err(BatchError::TableTooShort { request, position, entries });
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
