//! KV events: what enters and leaves each replica's prefix index, published over ZMQ in vLLM's format.
//!
//! The scheduler's thread hands each step's changes to a `Feed`, which never waits. One publisher
//! thread per replica numbers them, keeps the last ones for replay, and owns the sockets. The other
//! half reads: `decode`, `Follower` and `Resident` are what a subscriber needs, ours or a test's.

mod arrears;
mod decode;
mod encode;
mod endpoint;
mod feed;
mod figures;
mod follower;
mod journal;
mod message_ring;
mod mirror;
mod pace;
mod publish;
mod publisher;
mod replay;
mod resident;
mod sockets;
mod source;
mod zmtp;

pub use arrears::Arrears;
pub use decode::{DecodeError, Event, Hash, Payload, Removed, Stored, decode};
pub use encode::Encoder;
pub use endpoint::{EndpointError, TopicWords};
pub use feed::{Bell, Changes, Feed, Room};
pub use figures::Figures;
pub use follower::{Arrival, Follower};
pub use journal::{Entry, Journal, Replay};
pub use mirror::Mirror;
pub use publisher::{Bound, Publisher};
pub use replay::{Request, RequestFrames};
pub use resident::{Resident, Violation};
pub use sockets::SocketError;
pub use source::Source;
pub use zmtp::{FrameError, FrameHead, FrameReader};
