//! What masked rows of a step may sample, and where that comes from.

use crate::{ExecutorError, TokenBitmaskError};
use protocol::{Batch, BitmaskRow, StepId};
use std::collections::BTreeMap;

/// Brings the masks of steps. They are asked for once the forward pass is under way.
pub trait TokenBitmaskSource {
    /// Waits for the masks of a step until there are as many as it has masked rows.
    ///
    /// Errors: the peer is gone, or the masks are late.
    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError>;
}

/// For those who run no constrained request.
#[derive(Debug, Clone, Copy)]
pub struct NoTokenBitmasks;

impl TokenBitmaskSource for NoTokenBitmasks {
    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        Err(TokenBitmaskError::Missing { step: step.0, rows, got: 0 }.into())
    }
}

/// The masks of one step, by row.
#[derive(Debug, Default)]
pub(crate) struct StepBitmasks {
    by_row: BTreeMap<usize, BitmaskRow>,
}

impl StepBitmasks {
    /// Waits for what the masked rows of `batch` need.
    ///
    /// Errors: as `TokenBitmaskSource::wait`, or a masked row got none.
    pub(crate) fn wait(
        batch: &Batch,
        masks: &mut dyn TokenBitmaskSource,
    ) -> Result<Self, ExecutorError> {
        let masked = || (0..).zip(&batch.rows).filter(|(_, row)| row.masked).map(|(i, _)| i);
        let (step, rows) = (batch.step, masked().count());
        if rows == 0 {
            return Ok(Self::default());
        }
        let got = masks.wait(step, rows)?;
        let by_row: BTreeMap<usize, BitmaskRow> =
            got.into_iter().map(|mask| (mask.row as usize, mask)).collect();
        match masked().find(|row| !by_row.contains_key(row)) {
            None => Ok(Self { by_row }),
            Some(_) => {
                Err(TokenBitmaskError::Missing { step: step.0, rows, got: by_row.len() }.into())
            }
        }
    }

    /// The mask of a row, if it is masked.
    pub(crate) fn of(&self, row: usize) -> Option<&[u32]> {
        self.by_row.get(&row).map(|mask| mask.bitmask.as_slice())
    }

    /// Whether a row goes without its sample.
    pub(crate) fn is_overdue(&self, row: usize) -> bool {
        self.by_row.get(&row).is_some_and(|mask| mask.overdue)
    }

    /// All such rows.
    pub(crate) fn overdue_rows(&self) -> Vec<usize> {
        self.by_row.iter().filter(|(_, mask)| mask.overdue).map(|(row, _)| *row).collect()
    }
}
