//! Threads that forward executor messages to the engine's inbox and report the end of each link.

use super::ExecutorReceiver;
use crate::client::{BulkInbox, EngineMessage, ExecutorId};
use crate::heartbeat_timeout::{HEARTBEAT_TIMEOUT, recv_within_timeout};
use protocol::{ExecutorEvent, Replica};
use scheduler::{ExecutorFailure, SchedulerEvent};
use std::sync::Arc;
use std::thread;

/// Starts a reader thread for each rank of a replica. Each thread ends after it has reported the failure of
/// its executor.
pub(crate) fn spawn_readers(
    replica: Replica,
    receivers: Vec<ExecutorReceiver>,
    inbox: &Arc<BulkInbox<EngineMessage>>,
) -> std::io::Result<()> {
    for (mut receiver, rank) in receivers.into_iter().zip(0..) {
        let inbox = Arc::clone(inbox);
        let sender = ExecutorId { replica, epoch: receiver.epoch, rank };
        thread::Builder::new().name("executor-link".to_owned()).spawn(move || {
            let (failure, cause) = forward_messages(&mut receiver, sender, &inbox);
            inbox.push(EngineMessage::ExecutorFailed { sender, failure, cause });
        })?;
    }
    Ok(())
}

/// Forwards the messages of an executor to the inbox until the link fails. Returns the failure class and the
/// cause.
fn forward_messages(
    receiver: &mut ExecutorReceiver,
    sender: ExecutorId,
    inbox: &BulkInbox<EngineMessage>,
) -> (ExecutorFailure, String) {
    loop {
        let message = match recv_within_timeout(receiver.messages.as_mut()) {
            Ok(Some(message)) => message,
            Ok(None) => match &receiver.process {
                None => continue,
                Some(process) => {
                    let seconds = HEARTBEAT_TIMEOUT.as_secs();
                    let cause = format!("{process} sent no heartbeat for {seconds} s");
                    return (ExecutorFailure::HeartbeatTimeout, cause);
                }
            },
            Err(error) => return (ExecutorFailure::Exited, receiver.failure_reason(&error)),
        };
        match message {
            // All ranks of a replica sample the same tokens, so only the output of rank 0 is used.
            ExecutorEvent::StepOutput(output) if sender.rank == 0 => {
                let replica = sender.replica;
                inbox.push(EngineMessage::Event(SchedulerEvent::StepOutput { replica, output }));
            }
            ExecutorEvent::StepOutput(output) => {
                inbox.push(EngineMessage::StepDone(sender, output.step));
            }
            ExecutorEvent::Drafts(drafts) => inbox.push(EngineMessage::Drafts(sender, drafts)),
            ExecutorEvent::StepDone { step, .. } => {
                inbox.push(EngineMessage::StepDone(sender, step));
            }
            ExecutorEvent::Fault { step, text } => {
                let at = step.map_or_else(String::new, |s| format!(" in step {}", s.0));
                return (
                    ExecutorFailure::ReportedFault,
                    format!("{} failed{at}: {text}", receiver.name()),
                );
            }
            ExecutorEvent::ProfilerStatus(status) => {
                inbox.push(EngineMessage::ProfileReply(sender, status));
            }
            ExecutorEvent::Heartbeat => inbox.push(EngineMessage::Heartbeat(sender)),
            ExecutorEvent::Hello(_)
            | ExecutorEvent::Endpoint(_)
            | ExecutorEvent::Progress { .. }
            | ExecutorEvent::WeightsLoaded(_)
            | ExecutorEvent::WarmUpDone(_)
            | ExecutorEvent::Ready(_) => {}
        }
    }
}
