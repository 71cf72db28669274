//! Writer loop of a link: sends the messages of a bounded channel, and heartbeats.

use super::{LinkError, MessageReceiver, MessageSender};
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Heartbeat settings of a link: the time without other messages after which a heartbeat is sent, and the
/// heartbeat message.
#[derive(Debug, Clone, Copy)]
pub struct HeartbeatConfig<M> {
    /// Maximum interval without a message, after which a heartbeat is sent.
    pub interval: Duration,
    /// Creates the heartbeat message.
    pub message: fn() -> M,
}

/// Maximum wait for a message if no heartbeats are configured. The bound limits the effect of a lost wake-up.
const IDLE_TIMEOUT: Duration = Duration::from_mins(1);

/// Sends the messages of `outbox` until all its senders are dropped or the peer closes the link.
///
/// Errors: the link failed for another reason than that the peer closed it.
pub fn run_writer<S: MessageSender>(
    mut outbox: Receiver<S::Message>,
    mut link: S,
    heartbeat: Option<&HeartbeatConfig<S::Message>>,
) -> Result<(), LinkError> {
    let wait = heartbeat.map_or(IDLE_TIMEOUT, |heartbeat| heartbeat.interval);
    loop {
        let message = match MessageReceiver::recv(&mut outbox, wait) {
            Ok(Some(message)) => message,
            Ok(None) => match heartbeat {
                Some(heartbeat) => (heartbeat.message)(),
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
