//! Collector of the masks of one step. It sends one message when all masks are ready, or at the step's
//! deadline.

use crate::sync::{Mutex, lock};
use protocol::{BitmaskRow, ExecutorCommand, GrammarBitmask, StepId};
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

/// Step that waits for the masks of its masked rows, and the masks that are ready.
pub(super) struct StepMaskCollector {
    step: StepId,
    executor: SyncSender<ExecutorCommand>,
    pending: Mutex<CollectedMasks>,
}

struct CollectedMasks {
    /// Batch row indices of the masks that have not arrived.
    missing: Vec<u32>,
    collected: Vec<BitmaskRow>,
}

impl StepMaskCollector {
    /// Creates the collector of a step with these masked rows, which was sent to `executor`.
    pub(super) fn new(
        step: StepId,
        executor: SyncSender<ExecutorCommand>,
        missing: Vec<u32>,
    ) -> Self {
        let collected = Vec::with_capacity(missing.len());
        Self { step, executor, pending: Mutex::new(CollectedMasks { missing, collected }) }
    }

    /// Adds the mask of the batch row with index `row`. Returns false if the step has proceeded without it.
    pub(super) fn put(&self, row: u32, allowed: Vec<u32>) -> bool {
        let mut pending = lock(&self.pending);
        let Some(index) = pending.missing.iter().position(|&missing| missing == row) else {
            return false;
        };
        pending.missing.swap_remove(index);
        pending.collected.push(BitmaskRow { row, bitmask: allowed, overdue: false });
        let complete = pending.missing.is_empty().then(|| take(&mut pending.collected));
        drop(pending);
        self.send(complete);
        true
    }

    /// Sends the masks that are ready at the deadline of the step. `overdue_masks` is incremented by the
    /// number of rows with overdue masks before the message is sent.
    pub(super) fn send_without_overdue(&self, overdue_masks: &AtomicU64) {
        let mut pending = lock(&self.pending);
        let overdue = take(&mut pending.missing);
        let without_mask =
            overdue.iter().map(|&row| BitmaskRow { row, bitmask: Vec::new(), overdue: true });
        pending.collected.extend(without_mask);
        let rows = (!overdue.is_empty()).then(|| take(&mut pending.collected));
        drop(pending);
        overdue_masks.fetch_add(overdue.len() as u64, Ordering::Relaxed);
        self.send(rows);
    }

    /// Whether every row has its mask.
    pub(super) fn is_complete(&self) -> bool {
        lock(&self.pending).missing.is_empty()
    }

    fn send(&self, rows: Option<Vec<BitmaskRow>>) {
        if let Some(rows) = rows {
            // Sending fails only after an executor failure. The failed executor needs no masks; the restarted
            // one gets the masks of new steps.
            let _ = self
                .executor
                .send(ExecutorCommand::Bitmask(GrammarBitmask { step: self.step, rows }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::sync_channel;

    #[test]
    fn step_gets_one_message_even_with_overdue_masks() {
        let (executor, commands) = sync_channel(4);
        let assert_sent = |expected: &[(u32, bool)]| match commands.try_recv() {
            Ok(ExecutorCommand::Bitmask(mask)) => {
                let rows: Vec<_> = mask.rows.iter().map(|row| (row.row, row.overdue)).collect();
                assert_eq!((mask.step, rows.as_slice()), (StepId(7), expected));
            }
            other => panic!("{other:?}"),
        };
        let step = || StepMaskCollector::new(StepId(7), executor.clone(), vec![2, 5]);
        let full = step();
        assert!(full.put(5, vec![1]) && commands.try_recv().is_err() && !full.is_complete());
        assert!(full.put(2, vec![1]) && full.is_complete());
        assert_sent(&[(5, false), (2, false)]);
        let overdue_count = AtomicU64::new(0);
        full.send_without_overdue(&overdue_count);
        assert_eq!(overdue_count.load(Ordering::Relaxed), 0);

        let partial = step();
        assert!(partial.put(5, vec![1]));
        partial.send_without_overdue(&overdue_count);
        assert_eq!(overdue_count.load(Ordering::Relaxed), 1);
        assert_sent(&[(5, false), (2, true)]);
        assert!(!partial.put(2, vec![1]), "the step has proceeded");
        assert!(commands.try_recv().is_err(), "one message");
    }
}
