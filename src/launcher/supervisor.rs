//! The main thread of a server: waits for whatever ends it, and starts its executor again.

use super::engine_thread::Notice;
use super::executor::{ExecutorGroup, RestartError};
use super::host::Host;
use super::shutdown::Front;
use std::process::ExitCode;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Serves until told to stop, or until nothing can be served any more. Returns the process's exit code.
///
/// `timeout`: how long streams may run on after a signal.
pub fn run(
    front: &Front<'_>,
    host: Host,
    mut group: ExecutorGroup,
    notices: &Receiver<Notice>,
    timeout: Duration,
) -> ExitCode {
    loop {
        let (epoch, cause) = match notices.recv() {
            Ok(Notice::Signal(number)) => {
                return front.drain(number, timeout, host, group, notices);
            }
            Ok(Notice::EngineFailed(text)) => return front.fail(&text),
            Ok(Notice::ExecutorLost { epoch, cause }) => (epoch, cause),
            Err(_) => return front.fail("nobody watches this process any more"),
        };
        let back = match group.restart(epoch, cause, notices) {
            Ok((link, up)) => host.resume(link, up.ready).map_err(|error| error.to_string()),
            // Nobody computes: streams have nothing to wait for.
            Err(RestartError::Signal(number)) => {
                return front.drain(number, Duration::ZERO, host, group, notices);
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(cause) = back {
            host.give_up(cause); // The answer is `EngineFailed`.
        }
    }
}
