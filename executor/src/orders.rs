//! Orders of the scheduler, in order; masks may be asked for ahead of what came before them.

use crate::{ExecutorError, MaskError, Masks};
use protocol::link::{LinkError, Receiving};
use protocol::{Mask, MaskRow, StepId, ToExecutor};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Waiting costs nothing; the bound only keeps a lost wake-up from lasting for ever.
const PATIENCE: Duration = Duration::from_mins(1);
/// Time until a peer that sends neither masks nor word of their lateness is taken for gone. It gives each row one of
/// them well within the deadline of its step.
const MASK_TIME: Duration = Duration::from_secs(20);

/// The direction from the scheduler.
pub(crate) struct Orders<'a, R> {
    link: &'a mut R,
    /// What arrived while masks were waited for.
    kept: VecDeque<ToExecutor>,
    /// Masks of steps that have not asked for them.
    early: Vec<Mask>,
}

impl<'a, R: Receiving<Message = ToExecutor>> Orders<'a, R> {
    pub(crate) fn new(link: &'a mut R) -> Self {
        Self { link, kept: VecDeque::new(), early: Vec::new() }
    }

    /// The next order that is no mask; `None` = nothing came for a long time.
    pub(crate) fn next(&mut self) -> Result<Option<ToExecutor>, LinkError> {
        if let Some(order) = self.kept.pop_front() {
            return Ok(Some(order));
        }
        match self.link.recv(PATIENCE)? {
            Some(ToExecutor::Mask(mask)) => {
                self.early.push(mask);
                Ok(None)
            }
            order => Ok(order),
        }
    }

    /// Masks of `step` that have come, to the end of `rows`. Those of former steps are nobody's any more.
    fn take(&mut self, step: StepId, rows: &mut Vec<MaskRow>) {
        self.early.retain(|mask| mask.step >= step);
        let (own, later) =
            std::mem::take(&mut self.early).into_iter().partition(|m| m.step == step);
        let own: Vec<Mask> = own;
        self.early = later;
        rows.extend(own.into_iter().flat_map(|mask| mask.rows));
    }
}

impl<R: Receiving<Message = ToExecutor>> Masks for Orders<'_, R> {
    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<MaskRow>, ExecutorError> {
        let since = Instant::now();
        let mut got = Vec::with_capacity(rows);
        loop {
            self.take(step, &mut got);
            if got.len() >= rows {
                return Ok(got);
            }
            let waited = since.elapsed();
            let Some(left) = MASK_TIME.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let (step, got, waited_ms) = (step.0, got.len(), waited.as_millis());
                return Err(MaskError::Late { step, rows, got, waited_ms }.into());
            };
            match self.link.recv(left).map_err(ExecutorError::Link)? {
                Some(ToExecutor::Mask(mask)) => self.early.push(mask),
                Some(order) => self.kept.push_back(order),
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::link::pair;

    fn mask(step: u64, row: u32) -> ToExecutor {
        let rows = vec![MaskRow { row, allowed: vec![row], late: false }];
        ToExecutor::Mask(Mask { step: StepId(step), rows })
    }

    #[test]
    fn masks_overtake_and_nothing_else_does() {
        let (ours, theirs) = pair::<ToExecutor, ()>(8);
        let sender = ours.sender;
        let mut receiver = theirs.receiver;
        for order in [mask(6, 9), mask(7, 0), ToExecutor::Profile { on: true }, mask(8, 3)] {
            sender.send(order).unwrap();
        }
        sender.send(ToExecutor::Shutdown).unwrap();
        sender.send(mask(7, 1)).unwrap();
        let mut orders = Orders::new(&mut receiver);
        let got = orders.wait(StepId(7), 2).unwrap();
        assert_eq!(got.iter().map(|mask| mask.row).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(orders.wait(StepId(8), 1).unwrap()[0].allowed, [3]);
        assert_eq!(orders.next(), Ok(Some(ToExecutor::Profile { on: true })));
        assert_eq!(orders.next(), Ok(Some(ToExecutor::Shutdown)));
        drop(sender);
        let gone = orders.wait(StepId(9), 1);
        assert!(matches!(gone, Err(ExecutorError::Link(LinkError::Closed))), "{gone:?}");
    }
}
