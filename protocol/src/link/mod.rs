//! Roads between two processes, or two threads that may become processes.

mod in_process;

pub use in_process::{InProcess, pair};

use std::time::Duration;

/// One end of an ordered, reliable, bounded stream of messages.
pub trait Link {
    /// What this end sends.
    type Out;
    /// What this end receives.
    type In;

    /// Sends one message; blocks while the peer's queue is full.
    ///
    /// Errors: `LinkError::Closed` if the peer is gone.
    fn send(&mut self, message: Self::Out) -> Result<(), LinkError>;

    /// Waits up to `timeout` for a message; `None` = nothing arrived in time.
    ///
    /// Errors: `LinkError::Closed` if the peer is gone and everything it sent was received.
    fn recv(&mut self, timeout: Duration) -> Result<Option<Self::In>, LinkError>;
}

/// Why a link failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The other end is gone.
    #[error("the peer closed the link")]
    Closed,
}
