//! Grammar bitmasks of the masked rows (rows sampled under a grammar) of a step, and the draft tokens from
//! which the bitmasks are computed.
//!
//! A masked row has a bitmask for its first sample position and one after each of its draft tokens. The draft
//! tokens are known only in the executor, which reports them to the scheduler: draft tokens of n-gram lookup
//! before the forward pass is launched, draft tokens of a proposer on the device as soon as they are copied
//! to the host, while the forward pass runs. Steps without draft tokens in masked rows report and copy
//! nothing.

use crate::{ExecutorError, TokenBitmaskError};
use protocol::{Batch, BitmaskRow, StepDrafts, StepId, TokenBitmask};
use std::collections::BTreeMap;

/// Source of the grammar bitmasks of steps. A step waits for its bitmasks after its forward pass has been
/// launched.
pub trait TokenBitmaskSource {
    /// Whether the source needs the draft tokens of rows that are sampled under a grammar, in order to
    /// compute the bitmasks.
    fn needs_drafts(&self) -> bool {
        true
    }

    /// Receives the draft tokens of the rows of a step that are sampled under a grammar. Called before
    /// `wait`, and only if `needs_drafts` returns true and the step has such draft tokens.
    ///
    /// Errors: the peer closed the link.
    fn report_drafts(&mut self, drafts: StepDrafts) -> Result<(), ExecutorError>;

    /// Waits for the bitmasks of the `rows` masked rows (rows sampled under a grammar) of a step, and returns
    /// the bitmasks.
    ///
    /// Errors: the peer closed the link, or the bitmasks did not arrive before the timeout.
    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError>;
}

/// Bitmask source for executors that run only unconstrained requests: it has no bitmasks.
#[derive(Debug, Clone, Copy)]
pub struct UnconstrainedBitmaskSource;

impl TokenBitmaskSource for UnconstrainedBitmaskSource {
    fn report_drafts(&mut self, _: StepDrafts) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        Err(TokenBitmaskError::Missing { step: step.0, rows, received: 0 }.into())
    }
}

/// Grammar bitmasks of one step, by row index.
#[derive(Debug, Default)]
pub(crate) struct StepBitmasks {
    by_row: BTreeMap<usize, BitmaskRow>,
}

impl StepBitmasks {
    /// Waits for the bitmasks of the rows of `batch` that are sampled under a grammar.
    ///
    /// Errors: `TokenBitmaskSource::wait` failed, or it returned no bitmask for such a row.
    pub(crate) fn wait(
        batch: &Batch,
        masks: &mut dyn TokenBitmaskSource,
    ) -> Result<Self, ExecutorError> {
        let masked = || (0..).zip(&batch.rows).filter(|(_, row)| row.masked).map(|(i, _)| i);
        let (step, rows) = (batch.step, masked().count());
        if rows == 0 {
            return Ok(Self::default());
        }
        let received = masks.wait(step, rows)?;
        let by_row: BTreeMap<usize, BitmaskRow> =
            received.into_iter().map(|mask| (mask.row as usize, mask)).collect();
        match masked().find(|row| !by_row.contains_key(row)) {
            None => Ok(Self { by_row }),
            Some(_) => {
                Err(TokenBitmaskError::Missing { step: step.0, rows, received: by_row.len() }
                    .into())
            }
        }
    }

    /// Returns the bitmask for the sample position after the first `draft_index` draft tokens of a row;
    /// `None` = the row is not sampled under a grammar, or the bitmask is overdue.
    pub(crate) fn at(&self, row: usize, draft_index: u8) -> Option<&TokenBitmask> {
        self.by_row.get(&row)?.bitmasks.get(usize::from(draft_index))
    }

    /// Returns the number of bitmasks of a row; `None` = the row is not sampled under a grammar.
    pub(crate) fn count(&self, row: usize) -> Option<usize> {
        self.by_row.get(&row).map(|mask| mask.bitmasks.len())
    }

    /// Returns the indices of all rows with overdue bitmasks, which sample no token.
    pub(crate) fn overdue_rows(&self) -> Vec<usize> {
        self.by_row.iter().filter(|(_, mask)| mask.is_overdue()).map(|(row, _)| *row).collect()
    }
}
