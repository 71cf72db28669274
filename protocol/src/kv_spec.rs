//! Layout of the KV cache as a value: a new attention kind extends it, and the scheduler counts with it.

use serde::{Deserialize, Serialize};

/// Everything the scheduler needs to know about a model's KV cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSpec {
    /// Token positions per block.
    pub block_tokens: u32,
    /// Layers that share one block table each.
    pub groups: Vec<KvGroup>,
}

/// Layers that share a block table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvGroup {
    /// Layer indices.
    pub layers: Vec<u16>,
    /// What is stored and for how long.
    pub kind: KvKind,
    /// Bytes of one block over all layers of the group, on one rank.
    pub bytes_per_block: u64,
}

/// What a group stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvKind {
    /// Keys and values of every position.
    Full,
    /// A latent of every position, from which keys and values are made.
    #[serde(rename = "Latent")]
    Mla,
}

impl KvSpec {
    /// Bytes of one block over all groups, on one rank.
    pub fn bytes_per_block(&self) -> u64 {
        self.groups.iter().map(|g| g.bytes_per_block).sum()
    }
}
