//! KV events: the changes of a replica's prefix index, in order.

use crate::Token;
use serde::{Deserialize, Serialize};

/// Chained hash of a full block: never 0, opaque to consumers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// Input besides token ids that a block's content depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExtraKey {
    /// LoRA adapter name; an extra key of every block.
    Lora(String),
    /// Cache salt; an extra key of the first block only.
    Salt(String),
}

/// One change of the prefix index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvEvent {
    /// Blocks were added to the prefix index; parents come before children.
    Stored {
        /// Hashes of a contiguous run of blocks.
        hashes: Vec<BlockHash>,
        /// Hash of the block before the run; `None` only for position 0.
        parent: Option<BlockHash>,
        /// Token ids of the run: `hashes.len() * block_tokens` ids.
        tokens: Vec<Token>,
        /// Extra keys per block; the list of a block may be empty.
        extra_keys: Vec<Vec<ExtraKey>>,
        /// Index of the KV group in `KvSpec::groups`.
        group: u8,
    },
    /// Blocks were evicted from the prefix index; children come before parents.
    Removed {
        /// Hashes of the evicted blocks.
        hashes: Vec<BlockHash>,
        /// Index of the KV group in `KvSpec::groups`.
        group: u8,
    },
    /// The prefix index was cleared.
    Cleared,
}
