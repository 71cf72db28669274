//! Commands of the scheduler, in order; grammar bitmasks may be read ahead of earlier commands.

use crate::{ExecutorError, TokenBitmaskError, TokenBitmaskSource};
use protocol::link::{LinkError, MessageReceiver};
use protocol::{BitmaskRow, ExecutorCommand, GrammarBitmask, StepId};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Timeout of a receive; it only bounds the effect of a lost wake-up.
const RECEIVE_TIMEOUT: Duration = Duration::from_mins(1);
/// Time after which a peer that sends neither bitmasks nor overdue notices has failed. The peer sends one of
/// them for each masked row well within the deadline of its step.
const BITMASK_TIMEOUT: Duration = Duration::from_secs(20);

/// Receiver of the scheduler's commands.
pub(crate) struct CommandInbox<'a, R> {
    link: &'a mut R,
    /// Commands that arrived while a step waited for bitmasks.
    deferred: VecDeque<ExecutorCommand>,
    /// Bitmasks of steps that have not waited for them yet.
    early_bitmasks: Vec<GrammarBitmask>,
}

impl<'a, R: MessageReceiver<Message = ExecutorCommand>> CommandInbox<'a, R> {
    pub(crate) fn new(link: &'a mut R) -> Self {
        Self { link, deferred: VecDeque::new(), early_bitmasks: Vec::new() }
    }

    /// Returns the next command that is no bitmask; `None` = a bitmask arrived, or the wait timed out.
    pub(crate) fn next(&mut self) -> Result<Option<ExecutorCommand>, LinkError> {
        if let Some(order) = self.deferred.pop_front() {
            return Ok(Some(order));
        }
        match self.link.recv(RECEIVE_TIMEOUT)? {
            Some(ExecutorCommand::Bitmask(mask)) => {
                self.early_bitmasks.push(mask);
                Ok(None)
            }
            order => Ok(order),
        }
    }

    /// Appends the received bitmasks of `step` to `rows`. Bitmasks of earlier steps are dropped.
    fn take(&mut self, step: StepId, rows: &mut Vec<BitmaskRow>) {
        self.early_bitmasks.retain(|mask| mask.step >= step);
        let (own, later) =
            std::mem::take(&mut self.early_bitmasks).into_iter().partition(|m| m.step == step);
        let own: Vec<GrammarBitmask> = own;
        self.early_bitmasks = later;
        rows.extend(own.into_iter().flat_map(|mask| mask.rows));
    }
}

impl<R: MessageReceiver<Message = ExecutorCommand>> TokenBitmaskSource for CommandInbox<'_, R> {
    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        let since = Instant::now();
        let mut got = Vec::with_capacity(rows);
        loop {
            self.take(step, &mut got);
            if got.len() >= rows {
                return Ok(got);
            }
            let waited = since.elapsed();
            let Some(left) = BITMASK_TIMEOUT.checked_sub(waited).filter(|left| !left.is_zero())
            else {
                let (step, got, waited_ms) = (step.0, got.len(), waited.as_millis());
                return Err(TokenBitmaskError::Timeout { step, rows, got, waited_ms }.into());
            };
            match self.link.recv(left).map_err(ExecutorError::Link)? {
                Some(ExecutorCommand::Bitmask(mask)) => self.early_bitmasks.push(mask),
                Some(order) => self.deferred.push_back(order),
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::link::in_process_pair;

    fn bitmask(step: u64, row: u32) -> ExecutorCommand {
        let rows = vec![BitmaskRow { row, bitmask: vec![row], overdue: false }];
        ExecutorCommand::Bitmask(GrammarBitmask { step: StepId(step), rows })
    }

    #[test]
    fn only_bitmasks_overtake_commands() {
        let (ours, theirs) = in_process_pair::<ExecutorCommand, ()>(8);
        let sender = ours.sender;
        let mut receiver = theirs.receiver;
        for order in [
            bitmask(6, 9),
            bitmask(7, 0),
            ExecutorCommand::Profile { enabled: true },
            bitmask(8, 3),
        ] {
            sender.send(order).unwrap();
        }
        sender.send(ExecutorCommand::Shutdown).unwrap();
        sender.send(bitmask(7, 1)).unwrap();
        let mut orders = CommandInbox::new(&mut receiver);
        let got = orders.wait(StepId(7), 2).unwrap();
        assert_eq!(got.iter().map(|mask| mask.row).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(orders.wait(StepId(8), 1).unwrap()[0].bitmask, [3]);
        assert_eq!(orders.next(), Ok(Some(ExecutorCommand::Profile { enabled: true })));
        assert_eq!(orders.next(), Ok(Some(ExecutorCommand::Shutdown)));
        drop(sender);
        let gone = orders.wait(StepId(9), 1);
        assert!(matches!(gone, Err(ExecutorError::Link(LinkError::Closed))), "{gone:?}");
    }
}
