//! KV events: changes of each replica's prefix index, published over ZMQ in vLLM's format.
//!
//! The scheduler thread passes the events of each step to a `KvEventFeed`, which never blocks. One publisher
//! thread per replica numbers the batches, keeps recent ones for replay and owns the sockets. For
//! subscribers, in Hadron and in tests, the module has a decoder (`decode`), `SequenceNumberTracker` and
//! `SubscriberBlocks`.

mod announced_blocks;
mod backlog;
mod config;
mod decode;
mod encode;
mod endpoint;
mod feed;
mod journal;
mod message_ring;
mod pace;
mod pub_socket;
mod publisher;
mod publisher_counters;
mod replay_socket;
mod sequence_number;
mod sockets;
mod source;
mod subscriber_blocks;
mod zmtp;

pub use announced_blocks::AnnouncedBlocks;
pub use backlog::EventBacklog;
pub use config::{BindMode, InitialSequenceNumber, KvEventFormat, KvEventsConfig};
pub use decode::{
    BlockRemoved, BlockStored, DecodeError, DecodedKvEvent, ExternalBlockHash, KvEventBatch, decode,
};
pub use encode::KvEventEncoder;
pub use endpoint::{EndpointError, TopicFields};
pub use feed::{FeedLimits, KvEventFeed, PublisherWaker, QueuedKvEvents};
pub use journal::{EventJournal, PublishedBatch, ReplayCursor};
pub use publisher::{BoundPublisher, KvEventPublisher};
pub use publisher_counters::PublisherCounters;
pub use replay_socket::{ReplayRequest, ReplayRequestReader};
pub use sequence_number::{BatchArrival, SequenceNumberTracker};
pub use sockets::SocketError;
pub use source::KvEventPublisherInfo;
pub use subscriber_blocks::{KvEventViolation, SubscriberBlocks};
pub use zmtp::{ZmtpFrameError, ZmtpFrameHead, ZmtpFrameReader};
