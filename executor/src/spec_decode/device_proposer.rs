//! Proposer for draft tokens that an MTP module, a draft model or an EAGLE-3 layer computes on the device.

use super::draft_states::DraftHiddenStateTracker;
use super::{DraftProposal, Proposer, StagedRowDrafts};
use crate::BatchError;
use ops::StagingBuffer;
use protocol::BatchRow;

/// Host part of a proposer on the device: selects the rows that get draft tokens, and tracks where the hidden
/// state of the token before each row is stored.
pub(crate) struct DeviceProposer {
    states: DraftHiddenStateTracker,
}

impl DeviceProposer {
    /// Creates a proposer. `states` tracks the hidden states of all sequence slots.
    pub(crate) fn new(states: DraftHiddenStateTracker) -> Self {
        Self { states }
    }
}

impl Proposer for DeviceProposer {
    fn propose(&mut self, row: &BatchRow) -> DraftProposal<'_> {
        if row.len == 1 && row.start > 0 {
            DraftProposal::OnDevice
        } else {
            DraftProposal::Tokens(&[])
        }
    }

    fn observe(&mut self, rows: &[BatchRow]) {
        self.states.update_tables(rows);
    }

    fn stage(
        &mut self,
        row: &BatchRow,
        staged_row: StagedRowDrafts,
        staging: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        self.states.stage(row, staged_row, staging)
    }
}
