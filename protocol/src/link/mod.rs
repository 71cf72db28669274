//! Roads between two processes, or two threads that may become processes.

mod in_process;
mod outbox;
mod socket;
mod stream;

pub use in_process::{InProcessLink, in_process_pair};
pub use outbox::{HeartbeatConfig, run_writer};
pub use socket::LinkSocket;
pub use stream::{FrameReader, FrameWriter, TimeoutRead, UnixLink, unix_link};

use crate::frame::FrameError;
use std::io::ErrorKind;
use std::time::Duration;

/// One end of an ordered, reliable, bounded stream of messages.
pub trait MessageLink {
    /// What this end sends.
    type SentMessage;
    /// What this end receives.
    type ReceivedMessage;
    /// The half that sends.
    type SenderHalf: MessageSender<Message = Self::SentMessage> + Send + 'static;
    /// The half that receives.
    type ReceiverHalf: MessageReceiver<Message = Self::ReceivedMessage> + Send + 'static;

    /// Sends one message; blocks while the peer's queue is full.
    ///
    /// Errors: `LinkError::Closed` if the peer is gone.
    fn send(&mut self, message: Self::SentMessage) -> Result<(), LinkError>;

    /// Waits up to `timeout` for a message; `None` = nothing arrived in time.
    ///
    /// Errors: `LinkError::Closed` if the peer is gone and everything it sent was received.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Self::ReceivedMessage>, LinkError>;

    /// The two directions, for owners that send and receive on different threads.
    fn split(self) -> (Self::SenderHalf, Self::ReceiverHalf);
}

/// The direction away from this end.
pub trait MessageSender {
    /// What is sent.
    type Message;

    /// As `MessageLink::send`.
    fn send(&mut self, message: Self::Message) -> Result<(), LinkError>;
}

/// The direction towards this end.
pub trait MessageReceiver {
    /// What is received.
    type Message;

    /// As `MessageLink::recv`.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Self::Message>, LinkError>;
}

/// A link made of two directions, of whatever kind each is.
#[derive(Debug)]
pub struct LinkHalves<S, R> {
    /// Away from this end.
    pub sender: S,
    /// Towards this end.
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

/// Why a link failed. Nothing can be sent or received after any of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The other end is gone.
    #[error("the peer closed the link")]
    Closed,
    /// What arrived is no frame, or what should be sent fits into none.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The system failed.
    #[error("the link failed: {0}")]
    Io(ErrorKind),
}
