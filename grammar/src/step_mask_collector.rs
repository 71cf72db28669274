//! Collects the masks of one step, and sends them in one message when all masks are ready or at the step's
//! deadline.
//!
//! A row with draft tokens has several masks: the first mask, and one mask after each draft token. The latter
//! are computed later, because the executor first has to report the draft tokens. At the deadline, the row is
//! sent with the masks that are ready; the row is overdue only if its first mask is not ready.

use crate::sync::{Mutex, lock};
use protocol::{BitmaskMessage, BitmaskRow, ExecutorCommand, StepId, TokenBitmask};
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

/// Collects the token bitmasks for the rows of one step, and sends them to the executor when they are
/// complete or overdue.
pub(super) struct StepMaskCollector {
    step: StepId,
    executor: SyncSender<ExecutorCommand>,
    /// Batch rows of the step that need token bitmasks; empty once the message has been sent.
    rows: Mutex<Vec<CollectedRow>>,
}

/// Batch row that needs token bitmasks, with the bitmasks that are already computed.
struct CollectedRow {
    row: BitmaskRow,
    is_complete: bool,
}

impl StepMaskCollector {
    /// Creates the collector for a step that was sent to `executor`; `rows` are the batch indices of its
    /// rows that need token bitmasks.
    pub(super) fn new(step: StepId, executor: SyncSender<ExecutorCommand>, rows: Vec<u32>) -> Self {
        let waiting = |row| CollectedRow {
            row: BitmaskRow { row, bitmasks: Vec::new() },
            is_complete: false,
        };
        Self { step, executor, rows: Mutex::new(rows.into_iter().map(waiting).collect()) }
    }

    /// Adds token bitmasks for the batch row `row`; `completes`: whether these are the last bitmasks of the
    /// row. Returns false if the step has already proceeded without these bitmasks.
    pub(super) fn put(&self, row: u32, bitmasks: Vec<TokenBitmask>, completes: bool) -> bool {
        let mut rows = lock(&self.rows);
        let waiting = |collected: &&mut CollectedRow| collected.row.row == row;
        let Some(collected) = rows.iter_mut().find(waiting).filter(|row| !row.is_complete) else {
            return false;
        };
        collected.row.bitmasks.extend(bitmasks);
        collected.is_complete = completes;
        let complete = rows.iter().all(|collected| collected.is_complete);
        let complete = if complete { take(&mut *rows) } else { Vec::new() };
        drop(rows);
        self.send(complete);
        true
    }

    /// Whether the step still waits for token bitmasks of the row.
    pub(super) fn awaits(&self, row: u32) -> bool {
        lock(&self.rows).iter().any(|collected| collected.row.row == row && !collected.is_complete)
    }

    /// Sends the token bitmasks that are ready at the step's deadline. Before sending, increases
    /// `overdue_masks` by the number of rows whose first bitmask is not ready.
    pub(super) fn send_without_overdue(&self, overdue_masks: &AtomicU64) {
        let rows = take(&mut *lock(&self.rows));
        let overdue = rows.iter().filter(|collected| collected.row.is_overdue()).count();
        overdue_masks.fetch_add(overdue as u64, Ordering::Relaxed);
        self.send(rows);
    }

    /// Whether the message with the step's token bitmasks has been sent.
    pub(super) fn is_complete(&self) -> bool {
        lock(&self.rows).is_empty()
    }

    fn send(&self, rows: Vec<CollectedRow>) {
        if !rows.is_empty() {
            let rows = rows.into_iter().map(|collected| collected.row).collect();
            // Sending fails only after an executor failure. The failed executor needs no masks, and the
            // restarted one gets masks for new steps.
            let _ = self
                .executor
                .send(ExecutorCommand::Bitmask(BitmaskMessage { step: self.step, rows }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, sync_channel};

    fn mask() -> Vec<TokenBitmask> {
        vec![vec![1].into()]
    }

    /// Checks that a message was sent with rows 2 and 5 and the given number of masks of each row.
    fn assert_sent(commands: &Receiver<ExecutorCommand>, masks: [usize; 2]) {
        match commands.try_recv() {
            Ok(ExecutorCommand::Bitmask(mask)) => {
                let rows: Vec<_> =
                    mask.rows.iter().map(|row| (row.row, row.bitmasks.len())).collect();
                assert_eq!((mask.step, rows), (StepId(7), vec![(2, masks[0]), (5, masks[1])]));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn step_gets_one_message_even_with_overdue_masks() {
        let (executor, commands) = sync_channel(4);
        let step = || StepMaskCollector::new(StepId(7), executor.clone(), vec![2, 5]);
        let full = step();
        assert!(full.put(5, mask(), true) && commands.try_recv().is_err() && !full.is_complete());
        assert!(!full.put(5, mask(), true), "the row has no further masks");
        assert!(full.put(2, mask(), true) && full.is_complete());
        assert_sent(&commands, [1, 1]);
        let overdue_count = AtomicU64::new(0);
        full.send_without_overdue(&overdue_count);
        assert_eq!(overdue_count.load(Ordering::Relaxed), 0);

        let partial = step();
        assert!(partial.put(5, mask(), true));
        partial.send_without_overdue(&overdue_count);
        assert_eq!(overdue_count.load(Ordering::Relaxed), 1);
        assert_sent(&commands, [0, 1]);
        assert!(!partial.put(2, mask(), true), "the step has proceeded");
        assert!(commands.try_recv().is_err(), "one message");
    }

    #[test]
    fn row_without_draft_masks_is_sent_at_the_deadline() {
        let (executor, commands) = sync_channel(4);
        let step = || StepMaskCollector::new(StepId(7), executor.clone(), vec![2, 5]);
        let (full, partial, overdue_count) = (step(), step(), AtomicU64::new(0));
        for step in [&full, &partial] {
            assert!(step.put(2, mask(), false) && step.put(5, mask(), true));
        }
        assert!(commands.try_recv().is_err(), "row 2 awaits masks after its draft tokens");
        assert!(full.put(2, [mask(), mask()].concat(), true));
        assert_sent(&commands, [3, 1]);
        partial.send_without_overdue(&overdue_count);
        assert_sent(&commands, [1, 1]);
        assert!(!partial.put(2, mask(), true), "the step has proceeded");
        assert_eq!(overdue_count.load(Ordering::Relaxed), 0, "the first mask was ready");
    }
}
