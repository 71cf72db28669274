//! Grammar bitmasks of the masked rows of a step.

use crate::{ExecutorError, TokenBitmaskError};
use protocol::{Batch, BitmaskRow, StepId};
use std::collections::BTreeMap;

/// Source of the grammar bitmasks of steps. A step reads it after its forward pass has been launched.
pub trait TokenBitmaskSource {
    /// Waits until `rows` bitmasks of a step have arrived, one per masked row, and returns them.
    ///
    /// Errors: the peer closed the link, or the bitmasks did not arrive before the timeout.
    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError>;
}

/// Bitmask source for executors that run only unconstrained requests: it has no bitmasks.
#[derive(Debug, Clone, Copy)]
pub struct UnconstrainedBitmasks;

impl TokenBitmaskSource for UnconstrainedBitmasks {
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
    /// Waits for the bitmasks of the masked rows of `batch`.
    ///
    /// Errors: an error of `TokenBitmaskSource::wait`, or a masked row did not get a bitmask.
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

    /// Returns the bitmask of a row, if it is masked.
    pub(crate) fn of(&self, row: usize) -> Option<&[u32]> {
        self.by_row.get(&row).map(|mask| mask.bitmask.as_slice())
    }

    /// Whether a row's bitmask is overdue. In that case the row samples no token.
    pub(crate) fn is_overdue(&self, row: usize) -> bool {
        self.by_row.get(&row).is_some_and(|mask| mask.overdue)
    }

    /// Returns the indices of all rows with overdue bitmasks.
    pub(crate) fn overdue_rows(&self) -> Vec<usize> {
        self.by_row.iter().filter(|(_, mask)| mask.overdue).map(|(row, _)| *row).collect()
    }
}
