//! Draft tokens proposed on the device: by an MTP module, a draft model or EAGLE-3.

use super::draft_states::DraftStateTracker;
use super::{Proposal, Proposer, StagedRow};
use crate::BatchError;
use ops::StagingBuffer;
use protocol::BatchRow;

/// Host side of a proposer on the device: which rows get draft tokens, and where the hidden state before each
/// row is.
pub(crate) struct DeviceProposer {
    states: DraftStateTracker,
}

impl DeviceProposer {
    /// Creates a proposer for `seq_slots` sequence slots and blocks of `block_tokens` tokens.
    /// `stores_states`: hidden states are stored, as MTP and EAGLE-3 need them; a draft model starts from
    /// tokens alone.
    pub(crate) fn new(seq_slots: usize, block_tokens: usize, stores_states: bool) -> Self {
        Self { states: DraftStateTracker::new(seq_slots, block_tokens, stores_states) }
    }
}

impl Proposer for DeviceProposer {
    fn propose(&mut self, row: &BatchRow) -> Proposal<'_> {
        if row.len == 1 && row.start > 0 { Proposal::OnDevice } else { Proposal::Tokens(&[]) }
    }

    fn observe(&mut self, rows: &[BatchRow]) {
        self.states.update_tables(rows);
    }

    fn stage(
        &mut self,
        row: &BatchRow,
        staged_row: StagedRow,
        staging: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        self.states.stage(row, staged_row, staging)
    }
}
