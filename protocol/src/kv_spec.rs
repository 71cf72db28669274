//! Layout of a model's KV cache. The scheduler computes block counts from it; a new kind of attention adds a
//! `KvKind`.

use serde::{Deserialize, Serialize};

/// KV cache layout of a model, as far as the scheduler needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSpec {
    /// Token positions per block.
    pub block_tokens: u32,
    /// Groups of layers; the layers of a group share one block table.
    pub groups: Vec<KvGroup>,
}

/// Layers that share one block table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvGroup {
    /// Layer indices.
    pub layers: Vec<u16>,
    /// Kind of state that is stored per token, such as keys and values.
    pub kind: KvKind,
    /// Bytes of one block over all layers of the group, on one rank.
    pub bytes_per_block: u64,
}

/// Kind of state that a KV group stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvKind {
    /// Keys and values of every position.
    Full,
    /// MLA: compressed KV of every position.
    #[serde(rename = "Latent")]
    Mla,
}

impl KvSpec {
    /// Returns the bytes of one block over all groups, on one rank.
    pub fn bytes_per_block(&self) -> u64 {
        self.groups.iter().map(|g| g.bytes_per_block).sum()
    }
}
