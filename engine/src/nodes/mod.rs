//! Multi-node serving: each node runs `hadron serve`; node 0 schedules and serves HTTP, the other nodes run
//! executors.
//!
//! Node 0 accepts connections (`node_listener.rs`) and tracks connected nodes (`node_registry.rs`) and the
//! start commands that it has sent (`start_command.rs`). Every other node connects, proves that it has the
//! secret (`handshake.rs`), joins (`node_zero_connection.rs`) and executes the commands of node 0
//! (`worker_node.rs`). The node responds to a command that starts a replica with one connection per rank.
//! Each executor process inherits its connection and communicates with node 0 directly, like an executor on
//! node 0. Executor processes never receive the secret.

mod cluster;
mod cluster_requirements;
mod deadline_stream;
mod dial;
mod handshake;
mod hmac_proof;
mod node_listener;
mod node_registry;
mod node_zero_connection;
mod remote_executor;
mod remote_executors;
mod start_command;
mod worker_node;

pub use cluster::{ClusterConfig, ClusterSecret};
pub use cluster_requirements::ClusterRequirements;
pub use node_listener::NodeListener;
pub use node_registry::NodeRegistry;
pub(crate) use remote_executors::{JoinDeadline, PendingRemoteStart, RemoteExecutors};
pub use worker_node::{WorkerNode, WorkerNodeConfig, WorkerNodeEvent, WorkerNodeExit};

use protocol::Epoch;
use std::time::Duration;

/// Epoch (executor generation) in the frames of connections between nodes. It is constant, because these
/// connections belong to no executor generation.
const EPOCH: Epoch = Epoch(0);
/// Maximum duration of the handshake of a connection.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Maximum length in bytes of the body of a message between nodes. Links to executors have a separate limit.
const BODY_BYTES_MAX: usize = 64 << 10;
/// Heartbeat interval between nodes.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Capacity, in messages, of the command queue to a node.
const OUTBOX_MESSAGES: usize = 64;
