//! Receives the scheduler's commands and returns them in order of arrival, with one exception: grammar
//! bitmasks are passed directly to the step that waits for them.

use crate::run::OutboxMessage;
use crate::{ExecutorError, TokenBitmaskError, TokenBitmaskSource};
use protocol::link::{LinkError, MessageReceiver};
use protocol::{BitmaskMessage, BitmaskRow, ExecutorCommand, ExecutorEvent, StepDrafts, StepId};
use std::collections::VecDeque;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// Maximum time that one receive call blocks. The caller repeats the call, so this value only bounds the
/// delay after a lost wake-up.
const RECEIVE_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum time that a step waits for the grammar bitmasks of its masked rows (rows sampled under a grammar).
/// A longer wait fails the executor: well before the step deadline, a working scheduler sends each bitmask or
/// reports it as overdue.
const BITMASK_TIMEOUT: Duration = Duration::from_secs(20);

/// Receives the scheduler's commands, and passes grammar bitmasks to the steps whose rows are sampled under a
/// grammar.
pub(crate) struct CommandInbox<'a, R> {
    link: &'a mut R,
    /// Commands other than `Bitmask` that arrived while a step waited for its bitmasks. `next` returns them
    /// later, in order of arrival.
    deferred: VecDeque<ExecutorCommand>,
    /// Grammar bitmasks that arrived before their step waited for them.
    early_bitmasks: Vec<BitmaskMessage>,
    /// Queue on which draft tokens are reported to the scheduler; `None` = another rank of the replica
    /// reports the draft tokens.
    outbox: Option<&'a SyncSender<OutboxMessage>>,
}

impl<'a, R: MessageReceiver<Message = ExecutorCommand>> CommandInbox<'a, R> {
    pub(crate) fn new(link: &'a mut R, outbox: Option<&'a SyncSender<OutboxMessage>>) -> Self {
        Self { link, deferred: VecDeque::new(), early_bitmasks: Vec::new(), outbox }
    }

    /// Returns the next command other than `Bitmask`; `None` = a bitmask arrived instead, or no command
    /// arrived before the timeout.
    pub(crate) fn next(&mut self) -> Result<Option<ExecutorCommand>, LinkError> {
        if let Some(command) = self.deferred.pop_front() {
            return Ok(Some(command));
        }
        match self.link.recv(RECEIVE_TIMEOUT)? {
            Some(ExecutorCommand::Bitmask(mask)) => {
                self.early_bitmasks.push(mask);
                Ok(None)
            }
            command => Ok(command),
        }
    }

    /// Moves the bitmasks of `step` from `early_bitmasks` to the end of `rows`, and discards the bitmasks of
    /// earlier steps.
    fn take(&mut self, step: StepId, rows: &mut Vec<BitmaskRow>) {
        self.early_bitmasks.retain(|mask| mask.step >= step);
        let (current, later) =
            std::mem::take(&mut self.early_bitmasks).into_iter().partition(|m| m.step == step);
        let current: Vec<BitmaskMessage> = current;
        self.early_bitmasks = later;
        rows.extend(current.into_iter().flat_map(|mask| mask.rows));
    }
}

impl<R: MessageReceiver<Message = ExecutorCommand>> TokenBitmaskSource for CommandInbox<'_, R> {
    fn needs_drafts(&self) -> bool {
        self.outbox.is_some()
    }

    fn report_drafts(&mut self, drafts: StepDrafts) -> Result<(), ExecutorError> {
        let Some(outbox) = self.outbox else { return Ok(()) };
        outbox
            .send(OutboxMessage::Message(ExecutorEvent::Drafts(drafts)))
            .map_err(|_| ExecutorError::Link(LinkError::Closed))
    }

    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        let started = Instant::now();
        let mut received = Vec::with_capacity(rows);
        loop {
            self.take(step, &mut received);
            if received.len() >= rows {
                return Ok(received);
            }
            let waited = started.elapsed();
            let Some(remaining) =
                BITMASK_TIMEOUT.checked_sub(waited).filter(|remaining| !remaining.is_zero())
            else {
                let (step, received, waited_ms) = (step.0, received.len(), waited.as_millis());
                return Err(TokenBitmaskError::Timeout { step, rows, received, waited_ms }.into());
            };
            match self.link.recv(remaining).map_err(ExecutorError::Link)? {
                Some(ExecutorCommand::Bitmask(mask)) => self.early_bitmasks.push(mask),
                Some(command) => self.deferred.push_back(command),
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
        let rows = vec![BitmaskRow { row, bitmasks: vec![vec![row].into()] }];
        ExecutorCommand::Bitmask(BitmaskMessage { step: StepId(step), rows })
    }

    #[test]
    fn only_bitmasks_overtake_commands() {
        let (ours, theirs) = in_process_pair::<ExecutorCommand, ()>(8);
        let sender = ours.sender;
        let mut receiver = theirs.receiver;
        for command in [
            bitmask(6, 9),
            bitmask(7, 0),
            ExecutorCommand::Profile { enabled: true },
            bitmask(8, 3),
        ] {
            sender.send(command).unwrap();
        }
        sender.send(ExecutorCommand::Shutdown).unwrap();
        sender.send(bitmask(7, 1)).unwrap();
        let mut inbox = CommandInbox::new(&mut receiver, None);
        let bitmasks = inbox.wait(StepId(7), 2).unwrap();
        assert_eq!(bitmasks.iter().map(|mask| mask.row).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(inbox.wait(StepId(8), 1).unwrap()[0].bitmasks, [vec![3].into()]);
        assert_eq!(inbox.next(), Ok(Some(ExecutorCommand::Profile { enabled: true })));
        assert_eq!(inbox.next(), Ok(Some(ExecutorCommand::Shutdown)));
        drop(sender);
        let closed = inbox.wait(StepId(9), 1);
        assert!(matches!(closed, Err(ExecutorError::Link(LinkError::Closed))), "{closed:?}");
    }
}
