//! What the host knows of drafts that the device makes, by the model's own draft layer (DeepSeek-V3, arXiv 2412.19437, section
//! 2.2) or by a model of its own: which rows get some, and for a layer where the hidden state before each row lies. The states, the layer's passes and what they make stay on the device.
//!
//! What the layer keeps of position `p` is made of token `p` and of the hidden state before it. It is the same bits
//! whatever comes behind, so chunks, recomputed rows and those behind a prefix hit keep what an undisturbed run does. The
//! state before a row is one of the newest of its seat's; behind a prefix hit it is the one at the end of the last block found,
//! which is kept for each block. Guesses are chained: for the second one the layer's own output stands for a hidden state.
//! What that leaves in the pool nobody sees: the tokens that turn out right are forwarded before anyone asks behind them.

#[cfg(test)]
mod tests;

use super::StagedRow;
use crate::BatchError;
use ops::{DraftRow, StagingBuffer};
use protocol::BatchRow;

/// Which hidden states the device has, by seat and by block.
pub(crate) struct DraftStateTracker {
    block_tokens: usize,
    /// Whether hidden states are kept: a model of its own begins with tokens alone.
    slot_states: bool,
    carry_over: Vec<CarryOverState>,
}

/// What a request's next row begins with.
#[derive(Default)]
struct CarryOverState {
    table: Vec<i32>,
    /// Position of the first hidden state that the seat holds.
    first_position: usize,
    /// How many it holds: of the newest token and its drafts, and of the one before, if there is one: a token whose mask
    /// came late is forwarded again. With those it may hold instead, where only the device knows how many drafts were accepted.
    state_count: usize,
}

/// Where the hidden state before a row lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PrecedingState {
    /// Nowhere: it is zeros, which nobody sees.
    Zeros,
    /// On the seat, which knows of what position its states are.
    InSlot,
    /// At the end of this block.
    AtBlockBoundary(i32),
}

/// Rows of a step that a draft layer has to do with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DraftRowCounts {
    /// Rows, or more where a recording has a fixed number.
    pub(crate) rows: usize,
    /// The first so many of them may have drafts; 0 = none does, and the layer makes none.
    pub(crate) drafting: usize,
    /// Rows that any replica drafts behind, where they share experts.
    pub(crate) dp_rows: usize,
}

impl DraftStateTracker {
    /// For so many seats, and blocks of so many tokens.
    pub(crate) fn new(seats: usize, block_tokens: usize, states: bool) -> Self {
        Self {
            block_tokens,
            slot_states: states,
            carry_over: (0..seats).map(|_| CarryOverState::default()).collect(),
        }
    }

    /// Takes over what rows whose seats exist say of their tables.
    pub(crate) fn update_tables(&mut self, rows: &[BatchRow]) {
        for row in rows {
            let seat = &mut self.carry_over[row.seq_slot.0 as usize];
            if row.seq_init.is_some() {
                *seat = CarryOverState::default();
            }
            for update in &row.table_updates {
                seat.table.truncate(update.first_entry as usize);
                seat.table.extend(update.blocks.iter().map(|block| block.0 as i32));
            }
        }
    }

    /// Stages what the layer must know of a row that has been heard of, whose first token is `token` of the step and which
    /// gets so many drafts.
    pub(crate) fn stage(
        &mut self,
        row: &BatchRow,
        StagedRow { token, device_drafts: drafts }: StagedRow,
        stage: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        let (held, edge) = match self.preceding_state(row)? {
            PrecedingState::Zeros => (0, -1),
            PrecedingState::InSlot => (1, -1),
            PrecedingState::AtBlockBoundary(block) => (0, block),
        };
        stage.drafts.push(DraftRow {
            seq_slot: row.seq_slot.0 as i32,
            len: row.len as i32,
            token: token as i32,
            drafts: drafts.into(),
            state_in_slot: held,
            boundary_block: edge,
            reserved: [0; 2],
        });
        let newest = (row.start + row.len) as usize - 1;
        let seat = &mut self.carry_over[row.seq_slot.0 as usize];
        seat.first_position = newest.saturating_sub(1);
        seat.state_count = newest - seat.first_position
            + 1
            + usize::from(drafts)
            + row.input.draft_slack() as usize;
        Ok(())
    }

    fn preceding_state(&self, row: &BatchRow) -> Result<PrecedingState, BatchError> {
        let seat = &self.carry_over[row.seq_slot.0 as usize];
        let before = (row.start as usize).checked_sub(1).filter(|_| self.slot_states);
        let Some(last) = before else { return Ok(PrecedingState::Zeros) };
        if last.checked_sub(seat.first_position).is_some_and(|place| place < seat.state_count) {
            return Ok(PrecedingState::InSlot);
        }
        let at_edge = (last + 1).is_multiple_of(self.block_tokens);
        let block = seat.table.get(last / self.block_tokens).filter(|_| at_edge);
        let (request, position) = (row.request, row.start);
        block
            .map(|&block| PrecedingState::AtBlockBoundary(block))
            .ok_or(BatchError::MissingHiddenState { request, position })
    }
}
