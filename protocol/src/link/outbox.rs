//! The one writer of a stream: empties a bounded channel that others fill, and gives signs of life.

use super::{LinkError, Receiving, Sending};
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// A sign of life that is sent when nothing else was for a while.
#[derive(Debug, Clone, Copy)]
pub struct Beat<M> {
    /// Longest silence.
    pub every: Duration,
    /// What is sent then.
    pub message: fn() -> M,
}

/// Waiting costs nothing where no beat is due; the bound only keeps a lost wake-up from lasting.
const PATIENCE: Duration = Duration::from_mins(1);

/// Sends what arrives in `outbox`, until every sender of it is gone or the peer is.
///
/// Errors: the link failed for another reason than a peer that left.
pub fn drain<S: Sending>(
    mut outbox: Receiver<S::Message>,
    mut link: S,
    beat: Option<&Beat<S::Message>>,
) -> Result<(), LinkError> {
    let wait = beat.map_or(PATIENCE, |beat| beat.every);
    loop {
        let message = match Receiving::recv(&mut outbox, wait) {
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
