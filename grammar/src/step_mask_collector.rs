//! Collector of the masks of one step. It sends one message when all masks are ready, or at the step's
//! deadline.

use crate::sync::{Mutex, lock};
use protocol::{BitmaskRow, ExecutorCommand, GrammarBitmask, StepId};
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

/// Step whose masked rows wait for their masks.
pub(super) struct StepMaskCollector {
    step: StepId,
    executor: SyncSender<ExecutorCommand>,
    pending: Mutex<CollectedMasks>,
}

struct CollectedMasks {
    /// Indices of the rows without a mask.
    waiting: Vec<u32>,
    gathered: Vec<BitmaskRow>,
}

impl StepMaskCollector {
    /// Creates the collector of a step with these masked rows, which was sent to `executor`.
    pub(super) fn new(
        step: StepId,
        executor: SyncSender<ExecutorCommand>,
        waiting: Vec<u32>,
    ) -> Self {
        let gathered = Vec::with_capacity(waiting.len());
        Self { step, executor, pending: Mutex::new(CollectedMasks { waiting, gathered }) }
    }

    /// Adds the mask of a row. Returns false if the step has proceeded without it.
    pub(super) fn put(&self, row: u32, allowed: Vec<u32>) -> bool {
        let mut open = lock(&self.pending);
        let Some(place) = open.waiting.iter().position(|&waiting| waiting == row) else {
            return false;
        };
        open.waiting.swap_remove(place);
        open.gathered.push(BitmaskRow { row, bitmask: allowed, overdue: false });
        let whole = open.waiting.is_empty().then(|| take(&mut open.gathered));
        drop(open);
        self.send(whole);
        true
    }

    /// Sends the masks that are ready at the deadline of the step. `late_masks` is incremented by the number
    /// of rows with overdue masks before the message is sent.
    pub(super) fn send_without_overdue(&self, late_masks: &AtomicU64) {
        let mut open = lock(&self.pending);
        let late = take(&mut open.waiting);
        let rows = late.iter().map(|&row| BitmaskRow { row, bitmask: Vec::new(), overdue: true });
        open.gathered.extend(rows);
        let whole = (!late.is_empty()).then(|| take(&mut open.gathered));
        drop(open);
        late_masks.fetch_add(late.len() as u64, Ordering::Relaxed);
        self.send(whole);
    }

    /// Whether every row has its mask.
    pub(super) fn is_complete(&self) -> bool {
        lock(&self.pending).waiting.is_empty()
    }

    fn send(&self, rows: Option<Vec<BitmaskRow>>) {
        if let Some(rows) = rows {
            // A failed executor needs no masks; its successor gets new ones.
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
        let (executor, sent) = sync_channel(4);
        let told = |late: &[(u32, bool)]| match sent.try_recv() {
            Ok(ExecutorCommand::Bitmask(mask)) => {
                let rows: Vec<_> = mask.rows.iter().map(|row| (row.row, row.overdue)).collect();
                assert_eq!((mask.step, rows.as_slice()), (StepId(7), late));
            }
            other => panic!("{other:?}"),
        };
        let step = || StepMaskCollector::new(StepId(7), executor.clone(), vec![2, 5]);
        let whole = step();
        assert!(whole.put(5, vec![1]) && sent.try_recv().is_err() && !whole.is_complete());
        assert!(whole.put(2, vec![1]) && whole.is_complete());
        told(&[(5, false), (2, false)]);
        let late = AtomicU64::new(0);
        whole.send_without_overdue(&late);
        assert_eq!(late.load(Ordering::Relaxed), 0);

        let torn = step();
        assert!(torn.put(5, vec![1]));
        torn.send_without_overdue(&late);
        assert_eq!(late.load(Ordering::Relaxed), 1);
        told(&[(5, false), (2, true)]);
        assert!(!torn.put(2, vec![1]), "the step is gone");
        assert!(sent.try_recv().is_err(), "one message");
    }
}
