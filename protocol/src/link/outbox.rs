//! The one writer of a stream: empties a bounded channel that others fill, and gives signs of life.

use super::{LinkError, MessageReceiver, MessageSender};
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// A sign of life that is sent when nothing else was for a while.
#[derive(Debug, Clone, Copy)]
pub struct HeartbeatConfig<M> {
    /// Longest silence.
    pub interval: Duration,
    /// What is sent then.
    pub message: fn() -> M,
}

/// Waiting costs nothing where no beat is due; the bound only keeps a lost wake-up from lasting.
const IDLE_TIMEOUT: Duration = Duration::from_mins(1);

/// Sends what arrives in `outbox`, until every sender of it is gone or the peer is.
///
/// Errors: the link failed for another reason than a peer that left.
pub fn run_writer<S: MessageSender>(
    mut outbox: Receiver<S::Message>,
    mut link: S,
    beat: Option<&HeartbeatConfig<S::Message>>,
) -> Result<(), LinkError> {
    let wait = beat.map_or(IDLE_TIMEOUT, |beat| beat.interval);
    loop {
        let message = match MessageReceiver::recv(&mut outbox, wait) {
            Ok(Some(message)) => message,
            Ok(None) => match beat {
                Some(beat) => (beat.message)(),
                None => continue,
            },
            Err(_) => return Ok(()),
        };
        match link.send(message) {
            Ok(()) => {}
            Err(LinkError::Closed) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}
