//! Why a connection ends.

use super::frame::ZmtpFrameError;
use std::io;
use std::time::Duration;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// The peer has closed it.
    #[error("closed by the peer")]
    Closed,
    /// The system ended it.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Bytes that are no frames.
    #[error(transparent)]
    Frame(#[from] ZmtpFrameError),
    /// The peer is none of those that this socket talks to.
    #[error("handshake: {0}")]
    Handshake(&'static str),
    /// The peer took too long.
    #[error("{what} after {} s", after.as_secs())]
    TimedOut {
        /// What was not done.
        what: &'static str,
        /// The time that it had.
        after: Duration,
    },
    /// The peer holds a large message that every other peer has.
    #[error("too slow for a message of more than {0} bytes")]
    HoldsLargeMessage(usize),
    /// What the peer asks for cannot be put into bytes.
    #[error("a snapshot cannot be encoded: {0}")]
    Encode(io::Error),
    /// What the peer asks for has no room at the moment.
    #[error("{0} replies made for single peers are being sent already")]
    NoCapacity(usize),
}

impl PeerError {
    /// Whether the peer did what no well-behaved one does.
    pub(crate) fn is_fault_of_peer(&self) -> bool {
        matches!(self, Self::Frame(_) | Self::Handshake(_) | Self::TimedOut { .. })
    }
}
