//! ZMTP 3, the wire protocol of ZeroMQ, limited to what a publisher needs: PUB and ROUTER sockets.
//!
//! libzmq does not bound the memory that a peer can occupy: it stores subscriptions in an unlimited trie, and
//! the frames of an endless message until the last one. This implementation uses a fixed amount of memory per
//! connection, whatever the peer sends, and limits the number of connections.

mod connection;
mod connector;
mod error;
mod frame;
mod peers;
mod stream;

pub(super) use connection::{OutgoingMessage, TransmitResult, ZmtpConnection, ZmtpSocketType};
pub(super) use connector::CollectorConnector;
pub(super) use error::PeerError;
pub use frame::{ZmtpFrameError, ZmtpFrameHead, ZmtpFrameReader};
pub(super) use frame::{frame_header, put_frame};
pub(super) use peers::{PeerState, PeerTable, ZmtpPeer};
pub(super) use stream::{PeerAddress, PeerListener};
