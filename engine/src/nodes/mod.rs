//! A server on several nodes: each is a `hadron serve`, node 0 schedules and answers, the others run executors.
//!
//! Node 0 listens (`node_listener.rs`), knows who is there (`node_registry.rs`) and what it has ordered (`start_order.rs`); every other
//! node connects, shows that it knows the secret (`handshake.rs`), and does what it is told (`worker_node.rs`). An order to
//! start a replica is answered with one connection for each rank, which the executor inherits: it speaks to node 0
//! itself, as it would on node 0. Secrets never leave the processes that serve.

mod cluster;
mod deadline_stream;
mod dial;
mod handshake;
mod hmac_proof;
mod node_listener;
mod node_registry;
mod remote_executor;
mod remote_group;
mod start_order;
mod worker_node;

pub use cluster::{ClusterConfig, ClusterSecret};
pub use node_listener::NodeListener;
pub use node_registry::{ClusterRequirements, NodeRegistry};
pub(crate) use remote_group::{AbsenceLimit, PendingRemoteStart, RemoteGroup};
pub use worker_node::{WorkerNode, WorkerNodeEvent, WorkerNodeExit, WorkerNodeSetup};

use protocol::Epoch;
use std::time::Duration;

/// Frames between nodes belong to no generation of executors.
const EPOCH: Epoch = Epoch(0);
/// A connection must have shown that it knows the secret, and said what it is for.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Longest body of a message between nodes; an executor's link, once it is one, has its own bound.
const BODY_BYTES_MAX: usize = 64 << 10;
/// Longest silence of a node that is well.
const BEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Messages that may wait to be written to a node.
const OUTBOX_MESSAGES: usize = 64;
