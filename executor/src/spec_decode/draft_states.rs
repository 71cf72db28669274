//! Host state of draft tokens that the device proposes, by an MTP module (DeepSeek-V3, arXiv 2412.19437,
//! section 2.2), an EAGLE-3 layer or a draft model: which rows get draft tokens, and, for MTP and EAGLE-3,
//! where the hidden state before each row is. The states, the passes and their draft tokens stay on the
//! device.
//!
//! The draft KV of position `p` is computed from token `p` and the hidden state of the token before it. Its
//! bits do not depend on later tokens, so chunks, recomputed rows and rows after a prefix hit write the same
//! KV as an uninterrupted run. The state before a row is one of the newest states of its sequence slot; after
//! a prefix hit it is the block-boundary state of the last hit block, which is stored for each block. Draft
//! passes are chained: from the second draft token on, the output of the previous pass replaces the hidden
//! state. The KV of such passes is never read later: accepted tokens are forwarded, and their KV rewritten,
//! before any later token attends to them.

#[cfg(test)]
mod tests;

use super::StagedRow;
use crate::BatchError;
use ops::{DraftRow, StagingBuffer};
use protocol::BatchRow;

/// Tracks which hidden states are on the device, by sequence slot and by block.
pub(crate) struct DraftStateTracker {
    block_tokens: usize,
    /// Whether hidden states are stored: a draft model starts from tokens alone.
    stores_states: bool,
    carry_over: Vec<CarryOverState>,
}

/// Carry-over state that a request's next row starts from.
#[derive(Default)]
struct CarryOverState {
    table: Vec<i32>,
    /// Position of the first hidden state in the sequence slot.
    first_position: usize,
    /// Number of hidden states in the slot: of the newest token and its draft tokens, and of the token
    /// before, if there is one, because a row with an overdue bitmask is forwarded again. With pending drafts
    /// (`draft_slack`) an upper bound: only the device has the number of accepted draft tokens.
    state_count: usize,
}

/// Location of the hidden state before a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PrecedingState {
    /// None: zeros are used, and no position attends to the result.
    Zeros,
    /// In the sequence slot; the device has the positions of the slot's states.
    InSlot,
    /// The block-boundary state of this block.
    AtBlockBoundary(i32),
}

/// Row counts of a step for the proposer on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DraftRowCounts {
    /// Number of rows; in a captured graph its fixed number of rows.
    pub(crate) rows: usize,
    /// Number of leading rows that may have draft tokens; 0 disables proposals for the step.
    pub(crate) drafting: usize,
    /// Number of drafting rows that each replica is padded to, if replicas share experts.
    pub(crate) dp_rows: usize,
}

impl DraftStateTracker {
    /// Creates a tracker for `seq_slots` sequence slots and blocks of `block_tokens` tokens.
    pub(crate) fn new(seq_slots: usize, block_tokens: usize, states: bool) -> Self {
        Self {
            block_tokens,
            stores_states: states,
            carry_over: (0..seq_slots).map(|_| CarryOverState::default()).collect(),
        }
    }

    /// Applies the block table updates of rows whose sequence slots are up to date.
    pub(crate) fn update_tables(&mut self, rows: &[BatchRow]) {
        for row in rows {
            let carry_over = &mut self.carry_over[row.seq_slot.0 as usize];
            if row.seq_init.is_some() {
                *carry_over = CarryOverState::default();
            }
            for update in &row.table_updates {
                carry_over.table.truncate(update.first_entry as usize);
                carry_over.table.extend(update.blocks.iter().map(|block| block.0 as i32));
            }
        }
    }

    /// Stages the draft row of a row that `update_tables` has seen: `token` is the index of its first token
    /// in the step, and it gets `device_drafts` draft tokens.
    pub(crate) fn stage(
        &mut self,
        row: &BatchRow,
        StagedRow { token, device_drafts: drafts }: StagedRow,
        stage: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        let (in_slot, boundary_block) = match self.preceding_state(row)? {
            PrecedingState::Zeros => (0, -1),
            PrecedingState::InSlot => (1, -1),
            PrecedingState::AtBlockBoundary(block) => (0, block),
        };
        stage.drafts.push(DraftRow {
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

    fn preceding_state(&self, row: &BatchRow) -> Result<PrecedingState, BatchError> {
        let carry_over = &self.carry_over[row.seq_slot.0 as usize];
        let before = (row.start as usize).checked_sub(1).filter(|_| self.stores_states);
        let Some(last) = before else { return Ok(PrecedingState::Zeros) };
        if last
            .checked_sub(carry_over.first_position)
            .is_some_and(|offset| offset < carry_over.state_count)
        {
            return Ok(PrecedingState::InSlot);
        }
        let at_boundary = (last + 1).is_multiple_of(self.block_tokens);
        let block = carry_over.table.get(last / self.block_tokens).filter(|_| at_boundary);
        let (request, position) = (row.request, row.start);
        block
            .map(|&block| PrecedingState::AtBlockBoundary(block))
            .ok_or(BatchError::MissingHiddenState { request, position })
    }
}
