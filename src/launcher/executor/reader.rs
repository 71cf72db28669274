//! The threads that move executors' messages into the engine's inbox, and notice their end.

use super::Incoming;
use crate::engine_client::{Inbox, Sender, Signal};
use crate::launcher::silence::{SILENCE, heard};
use protocol::{FromExecutor, Replica};
use scheduler::{Event, Loss};
use std::sync::Arc;
use std::thread;

/// Starts a thread for each rank of a replica. It ends with its executor, after it has said so.
pub(in crate::launcher) fn spawn_readers(
    replica: Replica,
    from: Vec<Incoming>,
    inbox: &Arc<Inbox<Signal>>,
) -> std::io::Result<()> {
    for (mut from, rank) in from.into_iter().zip(0..) {
        let inbox = Arc::clone(inbox);
        let sender = Sender { replica, epoch: from.epoch, rank };
        thread::Builder::new().name("executor-link".to_owned()).spawn(move || {
            let (loss, cause) = read(&mut from, sender, &inbox);
            inbox.push(Signal::Lost { sender, loss, cause });
        })?;
    }
    Ok(())
}

/// Passes messages on until there are no more. Returns why.
fn read(from: &mut Incoming, sender: Sender, inbox: &Inbox<Signal>) -> (Loss, String) {
    loop {
        let message = match heard(from.messages.as_mut()) {
            Ok(Some(message)) => message,
            Ok(None) => match &from.process {
                None => continue,
                Some(process) => {
                    let seconds = SILENCE.as_secs();
                    let cause = format!("{process} gave no sign of life for {seconds} s");
                    return (Loss::Silent, cause);
                }
            },
            Err(error) => return (Loss::Exited, from.cause(&error)),
        };
        match message {
            // The ranks of a replica compute the same; the first one's answer is taken.
            FromExecutor::StepOutput(output) if sender.rank == 0 => {
                let replica = sender.replica;
                inbox.push(Signal::Event(Event::Output { replica, output }));
            }
            FromExecutor::StepOutput(output) => inbox.push(Signal::StepDone(sender, output.step)),
            FromExecutor::StepDone { step, .. } => inbox.push(Signal::StepDone(sender, step)),
            FromExecutor::Fault { step, text } => {
                let at = step.map_or_else(String::new, |s| format!(" in step {}", s.0));
                return (Loss::Fault, format!("{} failed{at}: {text}", from.name()));
            }
            FromExecutor::Profiled(profiled) => inbox.push(Signal::Profiled(sender, profiled)),
            FromExecutor::Beat => inbox.push(Signal::Beat(sender)),
            FromExecutor::Hello(_)
            | FromExecutor::Progress { .. }
            | FromExecutor::Loaded(_)
            | FromExecutor::Memory(_)
            | FromExecutor::Ready(_) => {}
        }
    }
}
