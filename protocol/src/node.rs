//! Messages between the nodes of a cluster: authentication, commands of node 0, events of other nodes.

use crate::{DeviceLibraries, Epoch, ParallelConfig, Rank};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Number that is used in one handshake only.
pub type HandshakeNonce = [u8; 32];
/// HMAC-SHA-256 under the cluster secret.
pub type HandshakeProof = [u8; 32];

/// Mutual authentication on a new connection between nodes: each side proves that it has the cluster secret
/// without sending it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeHandshake {
    /// First message, from node 0 to a connecting node.
    Challenge {
        /// Nonce of node 0.
        nonce: HandshakeNonce,
    },
    /// Second message, from the connecting node.
    Response {
        /// Nonce of the connecting node.
        nonce: HandshakeNonce,
        /// Proof over both nonces, computed by the connecting node.
        proof: HandshakeProof,
    },
    /// Third message: node 0 accepts the connection.
    Welcome {
        /// Proof over both nonces, computed by node 0.
        proof: HandshakeProof,
    },
    /// Third message: node 0 denies the connection, because the proof was computed with another secret.
    Denied,
}

/// Messages from node 0 to another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeCommand {
    /// Response to `Join`: the node is accepted.
    Accepted,
    /// Response to `Join`: the settings of the node do not match the cluster.
    Rejected {
        /// Reason, with the value of node 0 and the value of the other node.
        reason: String,
    },
    /// Kills remaining executors of a group on the node, starts new ones, and connects each to node 0.
    Start {
        /// World rank of the first executor to start.
        first_rank: Rank,
        /// Number of executors, which have consecutive ranks.
        count: u16,
        /// Epoch of the executors.
        epoch: Epoch,
        /// Number that identifies the command. Each executor link presents it in its `ExecutorLinkRequest`.
        ticket: u64,
    },
    /// The executors received a shutdown command: the node waits for their exit, then leaves the cluster.
    Leave,
    /// Node 0 is alive.
    Heartbeat,
}

/// Messages from another node to node 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeEvent {
    /// First message on a control connection.
    Join(NodeInfo),
    /// First and only message on a connection that becomes an executor link.
    Link(ExecutorLinkRequest),
    /// The executors of a `Start` command cannot be started.
    StartFailed {
        /// Ticket of the command.
        ticket: u64,
        /// Reason for which the executors cannot be started.
        reason: String,
    },
    /// An executor process exited.
    ExecutorExited {
        /// Rank of the executor.
        rank: Rank,
        /// Epoch of the executor.
        epoch: Epoch,
        /// Description of the process and its exit status.
        description: String,
    },
    /// The node is alive.
    Heartbeat,
}

/// Identity of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Index of the node.
    pub node: u16,
    /// Number of nodes in the cluster, as configured on the node.
    pub nodes: u16,
    /// Parallel configuration, as configured on the node.
    pub parallel: ParallelConfig,
    /// Version of the node's build.
    pub build: String,
    /// Digest of the model folder, as in `ExecutorHello`.
    pub model_digest: u64,
}

/// First message on a connection from another node that becomes the link of an executor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorLinkRequest {
    /// Ticket of the `Start` command that started the executor.
    pub ticket: u64,
    /// World rank of the executor.
    pub rank: Rank,
    /// Settings that depend on the host of the executor.
    pub host: HostSettings,
}

/// Executor settings that depend on the host: node 0 takes them from the node of the executor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSettings {
    /// Model folder, as in `ExecutorSettings`.
    pub model_dir: PathBuf,
    /// Paths of device libraries, as in `ExecutorSettings`.
    pub libraries: Option<DeviceLibraries>,
    /// Cache folder of compiled kernels, as in `ExecutorSettings`.
    pub kernel_cache: Option<PathBuf>,
    /// Number of CPU compute threads, as in `ExecutorSettings`.
    pub threads: Option<u32>,
    /// Rendezvous file of the ranks of the host, as in `ExecutorSettings`.
    pub rendezvous: Option<PathBuf>,
    /// GPU index of each rank of the host, as in `ExecutorSettings`.
    pub gpus: Vec<u32>,
    /// Name or address of the host, as in `ExecutorSettings`.
    pub host_address: Option<String>,
}
