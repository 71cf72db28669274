//! Errors that end a connection to a ZMTP peer.

use super::frame::ZmtpFrameError;
use std::io;
use std::time::Duration;

/// Error that ends a connection to a ZMTP peer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// The peer closed the connection.
    #[error("closed by the peer")]
    Closed,
    /// The operating system reported an error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer sent invalid frames.
    #[error(transparent)]
    Frame(#[from] ZmtpFrameError),
    /// The peer's greeting or READY command is not compatible with this socket.
    #[error("handshake: {0}")]
    Handshake(&'static str),
    /// The peer did not meet a time limit.
    #[error("{what} after {} s", after.as_secs())]
    TimedOut {
        /// Condition that was not met in time.
        what: &'static str,
        /// Time limit that the peer has exceeded.
        after: Duration,
    },
    /// A slow peer is the only owner of a large message, which was evicted from the ring.
    #[error("too slow for a message of more than {0} bytes")]
    HoldsLargeMessage(usize),
    /// A snapshot of the KV blocks for a replay cannot be encoded.
    #[error("a snapshot cannot be encoded: {0}")]
    Encode(io::Error),
    /// A replay needs a snapshot, but the limit of concurrent snapshots is reached.
    #[error("{0} snapshots are being sent already")]
    NoCapacity(usize),
}

impl PeerError {
    /// Whether the peer violated the protocol or was too slow.
    pub(crate) fn is_fault_of_peer(&self) -> bool {
        matches!(self, Self::Frame(_) | Self::Handshake(_) | Self::TimedOut { .. })
    }
}
