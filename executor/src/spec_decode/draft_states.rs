//! Host state for draft tokens that are proposed on the device by an MTP module (DeepSeek-V3, arXiv
//! 2412.19437, section 2.2), an EAGLE-3 layer or a draft model. It selects the rows that get draft tokens.
//! For MTP and EAGLE-3, it also tracks where the hidden state of the token before each row is stored. The
//! hidden states, the draft passes and the draft tokens stay on the device.
//!
//! The draft KV of position `p` is computed from token `p` and the hidden state of token `p - 1`. It does not
//! depend on later tokens, so rows of chunked prefill, recomputation or a prefix hit write bit-identical
//! draft KV to an uninterrupted run. The hidden state before a row is one of the newest hidden states of its
//! sequence slot. After a prefix hit it is instead the block-boundary state (the hidden state of a block's
//! last token, stored for each block) of the last hit block. Draft passes are chained: from the second draft
//! token on, the output of the previous pass replaces the hidden state. The KV that chained passes write is
//! never read later: accepted tokens are forwarded again, and their KV is rewritten, before any later token
//! attends to them.

#[cfg(test)]
mod tests;

use super::StagedRowDrafts;
use crate::BatchError;
use crate::step::StepLimits;
use ops::{StagedDraftRow, StagingBuffer};
use protocol::BatchRow;

/// Tracks which hidden states are stored on the device, per sequence slot and per block.
pub(crate) struct DraftHiddenStateTracker {
    block_tokens: usize,
    /// Distance between the ids of successive blocks on the device.
    block_id_step: i32,
    /// Whether hidden states are stored. False for a draft model, which reads tokens only.
    stores_states: bool,
    carry_over: Vec<StoredHiddenStates>,
}

/// The hidden states that a sequence slot stores on the device for the next row of its request, and the
/// request's block table.
#[derive(Default)]
struct StoredHiddenStates {
    table: Vec<i32>,
    /// Token position of the first hidden state that the sequence slot stores.
    first_position: usize,
    /// Number of stored hidden states: of the newest token, of its draft tokens, and of the token before the
    /// newest token, if there is one. The last of these is needed because a row with an overdue grammar
    /// bitmask is forwarded again. While draft tokens are pending (`draft_slack`), this number is an upper
    /// bound: only the device has the number of accepted draft tokens.
    state_count: usize,
}

/// Location of the hidden state of the token before a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PrecedingHiddenStateLocation {
    /// No hidden state is stored and zeros are used, because the row starts at the first token or the
    /// proposer reads no hidden states. No position attends to draft KV that is computed from zeros.
    Zeros,
    /// The hidden state is stored in the sequence slot of the row. The device selects the hidden state by
    /// token position.
    InSlot,
    /// The hidden state of the last token of the block with this index, which is stored for each block.
    AtBlockBoundary(i32),
}

/// Row counts of a step that determine the sizes of the draft passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DraftRowCounts {
    /// Number of rows in the step. A captured graph has a fixed number of rows.
    pub(crate) rows: usize,
    /// Number of rows, counted from the first row, that may have draft tokens; 0 disables draft passes for
    /// the step.
    pub(crate) drafting: usize,
    /// If replicas share experts: number of rows with draft tokens to which each replica is padded; otherwise
    /// 0.
    pub(crate) dp_rows: usize,
}

impl DraftHiddenStateTracker {
    /// Creates a tracker for steps within `limits`. `block_id_step`: distance between the ids of successive blocks on the
    /// device. `stores_states`: whether hidden states of the target model are stored. MTP and EAGLE-3 read hidden
    /// states; a draft model reads tokens only.
    pub(crate) fn new(limits: &StepLimits, block_id_step: usize, stores_states: bool) -> Self {
        Self {
            block_tokens: limits.block_tokens as usize,
            block_id_step: block_id_step as i32,
            stores_states,
            carry_over: (0..limits.rows).map(|_| StoredHiddenStates::default()).collect(),
        }
    }

    /// Applies the updates of the block tables of KV group 0, which draft modules use, after the sequence slots
    /// of the rows have been updated.
    pub(crate) fn update_tables(&mut self, rows: &[BatchRow]) {
        for row in rows {
            let carry_over = &mut self.carry_over[row.seq_slot.0 as usize];
            if row.seq_init.is_some() {
                *carry_over = StoredHiddenStates::default();
            }
            for update in row.table_updates.iter().filter(|update| update.group == 0) {
                carry_over.table.truncate(update.first_entry as usize);
                let ids = update.blocks.iter().map(|block| block.0 as i32 * self.block_id_step);
                carry_over.table.extend(ids);
            }
        }
    }

    /// Writes the input of the draft passes for a row to the staging buffer, after `update_tables` has
    /// processed the row. `token` is the index of the row's first token in the step; the device proposes
    /// `device_drafts` draft tokens for the row.
    pub(crate) fn stage(
        &mut self,
        row: &BatchRow,
        StagedRowDrafts { token, device_drafts: drafts }: StagedRowDrafts,
        stage: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        let (in_slot, boundary_block) = match self.preceding_state(row)? {
            PrecedingHiddenStateLocation::Zeros => (0, -1),
            PrecedingHiddenStateLocation::InSlot => (1, -1),
            PrecedingHiddenStateLocation::AtBlockBoundary(block) => (0, block),
        };
        stage.drafts.push(StagedDraftRow {
            seq_slot: row.seq_slot.0 as i32,
            len: row.len as i32,
            token: token as i32,
            drafts: drafts.into(),
            state_in_slot: in_slot,
            boundary_block,
            reserved: [0; 2],
        });
        let newest = (row.start + row.len) as usize - 1;
        let carry_over = &mut self.carry_over[row.seq_slot.0 as usize];
        carry_over.first_position = newest.saturating_sub(1);
        carry_over.state_count = newest - carry_over.first_position
            + 1
            + usize::from(drafts)
            + row.input.draft_slack() as usize;
        Ok(())
    }

    fn preceding_state(&self, row: &BatchRow) -> Result<PrecedingHiddenStateLocation, BatchError> {
        let carry_over = &self.carry_over[row.seq_slot.0 as usize];
        let before = (row.start as usize).checked_sub(1).filter(|_| self.stores_states);
        let Some(last) = before else { return Ok(PrecedingHiddenStateLocation::Zeros) };
        if last
            .checked_sub(carry_over.first_position)
            .is_some_and(|offset| offset < carry_over.state_count)
        {
            return Ok(PrecedingHiddenStateLocation::InSlot);
        }
        let at_boundary = (last + 1).is_multiple_of(self.block_tokens);
        let block = carry_over.table.get(last / self.block_tokens).filter(|_| at_boundary);
        let (request, position) = (row.request, row.start);
        block
            .map(|&block| PrecedingHiddenStateLocation::AtBlockBoundary(block))
            .ok_or(BatchError::MissingHiddenState { request, position })
    }
}
