//! Configuration of a multi-node server and the secret shared by its nodes.

use std::fmt;
use std::ops::Range;

/// Multi-node configuration, as given by the flags of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Number of nodes, at least 2.
    pub nodes: u16,
    /// Rank of this node; node 0 runs the scheduler and the HTTP server.
    pub node: u16,
    /// Host name or address of node 0.
    pub host: String,
    /// Port on which node 0 listens for the other nodes.
    pub port: u16,
    /// Name or address at which the ranks of other nodes reach those of this node; `None` = the address of the connection
    /// to node 0, or `host` on node 0.
    pub node_address: Option<String>,
}

impl ClusterConfig {
    /// Returns the ranks of a node. Ranks are assigned to nodes in order, with an equal number per node.
    pub fn ranks_of(&self, node: u16, world_size: u16) -> Range<u16> {
        let count = world_size / self.nodes;
        node * count..(node + 1) * count
    }
}

/// Shared secret of the cluster; `Debug` does not reveal it.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret(String);

impl ClusterSecret {
    /// Creates a secret from `text` without surrounding white space, such as the newline at the end of a
    /// file.
    pub fn new(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// Bytes of the secret, used as the HMAC key.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterSecret(..)")
    }
}
