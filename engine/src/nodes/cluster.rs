//! The nodes of a server as one of them knows them, and the secret that they share.

use std::fmt;

/// A server of several nodes, as one of them sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Nodes, at least 2.
    pub nodes: u16,
    /// Which of them this is; 0 schedules and answers.
    pub node: u16,
    /// Where node 0 is.
    pub host: String,
    /// Where it listens for the others.
    pub port: u16,
}

impl ClusterConfig {
    /// Node of a replica: each has as many as the others, in order.
    pub fn node_of(&self, replica: u16, replicas: u16) -> u16 {
        replica / (replicas / self.nodes).max(1)
    }
}

/// A secret; it is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret(String);

impl ClusterSecret {
    /// The text without the white space around it, which files end with.
    pub fn new(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// What is proved to be known.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
