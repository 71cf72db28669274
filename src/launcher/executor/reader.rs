//! The thread that moves an executor's messages into the engine's inbox, and notices its end.

use super::Incoming;
use crate::engine_client::{Inbox, Signal};
use crate::launcher::engine_thread::REPLICA;
use crate::metrics::Loss;
use protocol::FromExecutor;
use scheduler::Event;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A process gives a sign of life every second.
const SILENCE: Duration = Duration::from_secs(5);
/// Had this process been paused, what arrived meanwhile is there at once.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// Starts the thread. It ends with the executor, after it has said so.
pub(in crate::launcher) fn spawn_reader(
    mut from: Incoming,
    inbox: Arc<Inbox<Signal>>,
) -> std::io::Result<JoinHandle<()>> {
    thread::Builder::new().name("executor-link".to_owned()).spawn(move || {
        let (loss, cause) = read(&mut from, &inbox);
        inbox.push(Signal::Lost { epoch: from.epoch, loss, cause });
    })
}

/// Passes messages on until there are no more. Returns why.
fn read(from: &mut Incoming, inbox: &Inbox<Signal>) -> (Loss, String) {
    let mut wait = SILENCE;
    loop {
        let message = match from.messages.recv(wait) {
            Ok(Some(message)) => message,
            Ok(None) => match &from.process {
                None => continue,
                Some(process) if wait == SECOND_LOOK => {
                    let seconds = SILENCE.as_secs();
                    let cause = format!("{process} gave no sign of life for {seconds} s");
                    return (Loss::Silent, cause);
                }
                Some(_) => {
                    wait = SECOND_LOOK;
                    continue;
                }
            },
            Err(error) => return (Loss::Exited, from.cause(&error)),
        };
        wait = SILENCE;
        match message {
            FromExecutor::StepOutput(output) => {
                inbox.push(Signal::Event(Event::Output { replica: REPLICA, output }));
            }
            FromExecutor::Fault { step, text } => {
                let at = step.map_or_else(String::new, |s| format!(" in step {}", s.0));
                return (Loss::Fault, format!("the executor failed{at}: {text}"));
            }
            FromExecutor::Profiled(profiled) => {
                inbox.push(Signal::Profiled(from.epoch, profiled));
            }
            FromExecutor::Beat => inbox.push(Signal::Beat),
            FromExecutor::StepDone { .. }
            | FromExecutor::Hello(_)
            | FromExecutor::Progress { .. }
            | FromExecutor::Memory(_)
            | FromExecutor::Ready(_) => {}
        }
    }
}
