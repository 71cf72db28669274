//! Message links between two processes, or between two threads.

mod halves;
mod in_process;
mod outbox;
mod socket;
mod stream;

pub use halves::LinkHalves;
pub use in_process::{InProcessLink, in_process_pair};
pub use outbox::{HeartbeatConfig, run_writer};
pub use socket::LinkSocket;
pub use stream::{FrameReader, FrameWriter, TimeoutRead, UnixLink, unix_link};

use crate::frame::FrameError;
use std::io::ErrorKind;
use std::time::Duration;

/// One end of an ordered, reliable, bounded stream of messages.
pub trait MessageLink {
    /// Type of the messages that this end sends.
    type SentMessage;
    /// Type of the messages that this end receives.
    type ReceivedMessage;
    /// Type of the sending half of the link.
    type SenderHalf: MessageSender<Message = Self::SentMessage> + Send + 'static;
    /// Type of the receiving half of the link.
    type ReceiverHalf: MessageReceiver<Message = Self::ReceivedMessage> + Send + 'static;

    /// Sends one message; blocks while the peer's queue is full.
    ///
    /// Errors: `LinkError::Closed` if the peer has closed the link.
    fn send(&mut self, message: Self::SentMessage) -> Result<(), LinkError>;

    /// Waits up to `timeout` for a message; `None` = timeout.
    ///
    /// Errors: `LinkError::Closed` if the peer has closed the link and all its messages were received.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Self::ReceivedMessage>, LinkError>;

    /// Splits the link, for owners that send and receive on different threads.
    fn split(self) -> (Self::SenderHalf, Self::ReceiverHalf);
}

/// Sending half of a link.
pub trait MessageSender {
    /// Type of the messages that are sent.
    type Message;

    /// Sends one message, as `MessageLink::send`.
    fn send(&mut self, message: Self::Message) -> Result<(), LinkError>;
}

/// Receiving half of a link.
pub trait MessageReceiver {
    /// Type of the messages that are received.
    type Message;

    /// Receives one message, as `MessageLink::recv`.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Self::Message>, LinkError>;
}

/// Error of a link. No message can be sent or received after an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The peer has closed the link.
    #[error("the peer closed the link")]
    Closed,
    /// The received bytes are not a frame, or the message to send does not fit a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// An I/O error of the operating system.
    #[error("the link failed: {0}")]
    Io(ErrorKind),
}
