//! Decoder of KV events in vLLM's format, as maps or arrays, from any publisher. Unknown keys are ignored.

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::io::Cursor;

/// Decoded batch of KV events.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct KvEventBatch {
    /// Time of the batch, in seconds of Unix time.
    pub ts: f64,
    /// Events in the order in which the prefix index changed.
    pub events: Vec<DecodedKvEvent>,
    /// DP rank of the publisher; some publishers with one rank send nil.
    pub data_parallel_rank: Option<u32>,
}

/// Change of a prefix index.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type")]
pub enum DecodedKvEvent {
    /// Blocks were added to the prefix index.
    BlockStored(BlockStored),
    /// Blocks were removed from the prefix index.
    BlockRemoved(BlockRemoved),
    /// All blocks were removed from the prefix index.
    AllBlocksCleared,
}

/// Event: blocks added to the prefix index.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct BlockStored {
    /// Hashes of consecutive blocks of one sequence.
    pub block_hashes: Vec<ExternalBlockHash>,
    /// Hash of the block before the first one; `None` = the first one begins a prompt.
    pub parent_block_hash: Option<ExternalBlockHash>,
    /// Token ids of all blocks; empty if the publisher omits them.
    pub token_ids: Vec<u32>,
    /// Tokens per block.
    pub block_size: u32,
    /// LoRA adapter id; deprecated in favour of `lora_name`.
    pub lora_id: Option<i64>,
    /// Storage medium of the blocks, such as `GPU`.
    pub medium: Option<String>,
    /// LoRA adapter name.
    pub lora_name: Option<String>,
    /// Extra keys that distinguish blocks with equal tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_keys: Option<Vec<Option<Vec<serde_json::Value>>>>,
    /// Index of the KV cache group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_idx: Option<u32>,
    /// Attention kind of the KV cache group, such as `full_attention`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_spec_kind: Option<String>,
    /// Sliding window size of the KV cache group, in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_spec_sliding_window: Option<u32>,
}

/// Event: blocks removed from the prefix index.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct BlockRemoved {
    /// Hashes of the blocks; children precede their parents.
    pub block_hashes: Vec<ExternalBlockHash>,
    /// Storage medium of the blocks, such as `GPU`.
    pub medium: Option<String>,
    /// Index of the KV cache group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_idx: Option<u32>,
}

/// Block hash: Hadron's publishers send integers, other publishers may send bytes or signed integers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExternalBlockHash {
    /// Hash as an integer.
    Number(u64),
    /// Hash as the bytes of a digest.
    Bytes(Vec<u8>),
}

impl fmt::Display for ExternalBlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number:016x}"),
            Self::Bytes(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

impl Serialize for ExternalBlockHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_u64(*number),
            Self::Bytes(_) => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for ExternalBlockHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BlockHashVisitor)
    }
}

/// Serde visitor that deserialises a block hash.
struct BlockHashVisitor;

impl<'de> Visitor<'de> for BlockHashVisitor {
    type Value = ExternalBlockHash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a block hash: an integer or bytes")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<ExternalBlockHash, E> {
        Ok(ExternalBlockHash::Number(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<ExternalBlockHash, E> {
        Ok(ExternalBlockHash::Number(number as u64))
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<ExternalBlockHash, E> {
        Ok(ExternalBlockHash::Bytes(bytes.to_vec()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut bytes: A) -> Result<ExternalBlockHash, A::Error> {
        let mut digest = Vec::new();
        while let Some(byte) = bytes.next_element()? {
            digest.push(byte);
        }
        Ok(ExternalBlockHash::Bytes(digest))
    }
}

/// Decodes the payload of a batch; trailing bytes are an error.
pub fn decode(payload: &[u8]) -> Result<KvEventBatch, DecodeError> {
    let mut reader = rmp_serde::Deserializer::new(Cursor::new(payload));
    let decoded = KvEventBatch::deserialize(&mut reader)?;
    let left = payload.len() - reader.get_ref().position() as usize;
    if left > 0 { Err(DecodeError::Trailing { left }) } else { Ok(decoded) }
}

/// Reason why a payload cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The payload is not MessagePack, or does not have the shape of a batch.
    #[error("not a batch of KV events: {0}")]
    Shape(#[from] rmp_serde::decode::Error),
    /// The payload has bytes after the end of the batch.
    #[error("{left} bytes follow the batch")]
    Trailing {
        /// Number of trailing bytes.
        left: usize,
    },
}
