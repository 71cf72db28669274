//! Changes of a replica's prefix index, in the order in which they happened.

use crate::Token;
use serde::{Deserialize, Serialize};

/// Chained hash of a full block: never 0, opaque to consumers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// Something besides token ids that a block's content depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExtraKey {
    /// Name of the adapter (every block).
    Lora(String),
    /// Cache salt (first block only).
    Salt(String),
}

/// One change of the prefix index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvEvent {
    /// Blocks became findable; parents come before children.
    Stored {
        /// Hashes of a contiguous run.
        hashes: Vec<BlockHash>,
        /// Hash of the block before the run; `None` only for position 0.
        parent: Option<BlockHash>,
        /// Token ids of the run, `hashes.len() * block_tokens` of them.
        tokens: Vec<Token>,
        /// Extra keys per block, empty lists where there are none.
        extra_keys: Vec<Vec<ExtraKey>>,
        /// KV group.
        group: u8,
    },
    /// Blocks were evicted, leaves first.
    Removed {
        /// Their hashes.
        hashes: Vec<BlockHash>,
        /// KV group.
        group: u8,
    },
    /// Nothing is cached any more.
    Cleared,
}
