//! Link composed of a sender and a receiver that work on different threads.

use super::{LinkError, MessageLink, MessageReceiver, MessageSender};
use std::time::Duration;

/// A link composed of a sender and a receiver.
#[derive(Debug)]
pub struct LinkHalves<S, R> {
    /// Sending half of the link.
    pub sender: S,
    /// Receiving half of the link.
    pub receiver: R,
}

impl<S, R> MessageLink for LinkHalves<S, R>
where
    S: MessageSender + Send + 'static,
    R: MessageReceiver + Send + 'static,
{
    type SentMessage = S::Message;
    type ReceivedMessage = R::Message;
    type SenderHalf = S;
    type ReceiverHalf = R;

    fn send(&mut self, message: S::Message) -> Result<(), LinkError> {
        self.sender.send(message)
    }

    fn recv(&mut self, timeout: Duration) -> Result<Option<R::Message>, LinkError> {
        self.receiver.recv(timeout)
    }

    fn split(self) -> (S, R) {
        (self.sender, self.receiver)
    }
}
