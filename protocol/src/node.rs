//! Messages between the nodes of a cluster: proof of the secret, what node 0 orders, what the others tell.

use crate::{DeviceLibraries, Epoch, ParallelConfig, Rank, Replica};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A number that is used once.
pub type HandshakeNonce = [u8; 32];
/// An HMAC-SHA-256 under the cluster's secret.
pub type HandshakeProof = [u8; 32];

/// What both ends of a connection between nodes say first: each shows that it knows the secret, without telling it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeHandshake {
    /// Node 0 to whoever connects.
    Challenge {
        /// Of node 0.
        nonce: HandshakeNonce,
    },
    /// The answer.
    Response {
        /// Of the other node.
        nonce: HandshakeNonce,
        /// Over both nonces, as the other node makes it.
        proof: HandshakeProof,
    },
    /// Node 0 lets the other one in.
    Welcome {
        /// Over both nonces, as node 0 makes it.
        proof: HandshakeProof,
    },
    /// Node 0 does not: the answer's proof is of another secret.
    Denied,
}

/// Node 0 to another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeCommand {
    /// Answer to `Join`: orders will come.
    Accepted,
    /// Answer to `Join`: this node does not belong to the cluster.
    Rejected {
        /// Why, with the numbers of both sides.
        reason: String,
    },
    /// Start the executors of a replica and link each to node 0; what is left of former ones is killed first.
    Start {
        /// Whose.
        replica: Replica,
        /// Their generation.
        epoch: Epoch,
        /// What each link must show.
        ticket: u64,
    },
    /// The executors have been told to stop: wait for their end, and leave.
    Leave,
    /// Node 0 is alive.
    Heartbeat,
}

/// Another node to node 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeEvent {
    /// First on a connection over which orders come.
    Join(NodeInfo),
    /// First, and only one, on a connection that becomes an executor's link.
    Link(ExecutorLinkOffer),
    /// The executors of an order cannot be started.
    StartFailed {
        /// Of the order.
        ticket: u64,
        /// Why.
        reason: String,
    },
    /// The process of an executor is over.
    ExecutorExited {
        /// Which.
        rank: Rank,
        /// Its generation.
        epoch: Epoch,
        /// Who it was, and how it ended.
        description: String,
    },
    /// The node is alive.
    Heartbeat,
}

/// A node as it presents itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Which node it is.
    pub node: u16,
    /// Nodes of the cluster, as it was told.
    pub nodes: u16,
    /// How the ranks share the work, as it was told.
    pub parallel: ParallelConfig,
    /// Release of the build.
    pub build: String,
    /// Digest of the model folder, as in `Hello`.
    pub model_digest: u64,
}

/// An executor that is about to run at the other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorLinkOffer {
    /// Of the order that asked for it.
    pub ticket: u64,
    /// Its rank in the world.
    pub rank: Rank,
    /// What its settings must say of its machine.
    pub host: HostSettings,
}

/// The part of an executor's settings that depends on the machine it runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSettings {
    /// As in `ExecutorSettings`.
    pub model_dir: PathBuf,
    /// As in `ExecutorSettings`.
    pub libraries: Option<DeviceLibraries>,
    /// As in `ExecutorSettings`.
    pub kernel_cache: Option<PathBuf>,
    /// As in `ExecutorSettings`.
    pub threads: Option<u32>,
    /// As in `ExecutorSettings`.
    pub rendezvous: Option<PathBuf>,
}
