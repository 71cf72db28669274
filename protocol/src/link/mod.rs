//! Roads between two processes, or two threads that may become processes.

mod in_process;
mod outbox;
mod socket;
mod stream;

pub use in_process::{InProcess, pair};
pub use outbox::{Beat, drain};
pub use socket::Socket;
pub use stream::{FrameReader, FrameWriter, Timed, UnixLink, unix};

use crate::frame::FrameError;
use std::io::ErrorKind;
use std::time::Duration;

/// One end of an ordered, reliable, bounded stream of messages.
pub trait Link {
    /// What this end sends.
    type Out;
    /// What this end receives.
    type In;
    /// The half that sends.
    type Sender: Sending<Message = Self::Out> + Send + 'static;
    /// The half that receives.
    type Receiver: Receiving<Message = Self::In> + Send + 'static;

    /// Sends one message; blocks while the peer's queue is full.
    ///
    /// Errors: `LinkError::Closed` if the peer is gone.
    fn send(&mut self, message: Self::Out) -> Result<(), LinkError>;

    /// Waits up to `timeout` for a message; `None` = nothing arrived in time.
    ///
    /// Errors: `LinkError::Closed` if the peer is gone and everything it sent was received.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Self::In>, LinkError>;

    /// The two directions, for owners that send and receive on different threads.
    fn split(self) -> (Self::Sender, Self::Receiver);
}

/// The direction away from this end.
pub trait Sending {
    /// What is sent.
    type Message;

    /// As `Link::send`.
    fn send(&mut self, message: Self::Message) -> Result<(), LinkError>;
}

/// The direction towards this end.
pub trait Receiving {
    /// What is received.
    type Message;

    /// As `Link::recv`.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Self::Message>, LinkError>;
}

/// A link made of two directions, of whatever kind each is.
#[derive(Debug)]
pub struct Halves<S, R> {
    /// Away from this end.
    pub sender: S,
    /// Towards this end.
    pub receiver: R,
}

impl<S, R> Link for Halves<S, R>
where
    S: Sending + Send + 'static,
    R: Receiving + Send + 'static,
{
    type Out = S::Message;
    type In = R::Message;
    type Sender = S;
    type Receiver = R;

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
