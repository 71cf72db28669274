//! ZMTP 3, the wire protocol of ZeroMQ, as far as publishers need it: the side that waits for subscribers.
//!
//! libzmq cannot bound what a peer makes it hold: subscriptions are kept in a trie without a limit, and the frames of
//! a message that never ends are kept until its last one. Here a connection has a fixed amount of memory, whatever
//! its peer sends, and the number of connections is limited.

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
