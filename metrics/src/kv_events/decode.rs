//! Bytes as events: maps and arrays, of any publisher that speaks vLLM's format. Unknown keys are ignored.

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::io::Cursor;

/// A decoded payload.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct KvEventBatch {
    /// Seconds of unix time.
    pub ts: f64,
    /// In the order in which the index changed.
    pub events: Vec<DecodedKvEvent>,
    /// Nil with some publishers that have one rank.
    pub data_parallel_rank: Option<u32>,
}

/// One change of an index.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type")]
pub enum DecodedKvEvent {
    /// Blocks can be found from now on.
    BlockStored(BlockStored),
    /// Blocks are gone.
    BlockRemoved(BlockRemoved),
    /// All blocks are gone.
    AllBlocksCleared,
}

/// Blocks that can be found from now on.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct BlockStored {
    /// A contiguous run.
    pub block_hashes: Vec<ExternalBlockHash>,
    /// The block before the run.
    pub parent_block_hash: Option<ExternalBlockHash>,
    /// Of the whole run; empty if the publisher leaves them out.
    pub token_ids: Vec<u32>,
    /// Tokens per block.
    pub block_size: u32,
    /// Deprecated by `lora_name`.
    pub lora_id: Option<i64>,
    /// Tier.
    pub medium: Option<String>,
    /// Adapter.
    pub lora_name: Option<String>,
    /// What sets blocks apart besides their tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_keys: Option<Vec<Option<Vec<serde_json::Value>>>>,
    /// KV group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_idx: Option<u32>,
    /// What the group stores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_spec_kind: Option<String>,
    /// Positions that a window keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_spec_sliding_window: Option<u32>,
}

/// Blocks that are gone.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct BlockRemoved {
    /// Leaves first.
    pub block_hashes: Vec<ExternalBlockHash>,
    /// Tier.
    pub medium: Option<String>,
    /// KV group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_idx: Option<u32>,
}

/// Name of a block: our publishers send integers, some others send bytes or signed integers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExternalBlockHash {
    /// An integer.
    Number(u64),
    /// A digest.
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

/// Decodes a payload; what follows it is an error.
pub fn decode(payload: &[u8]) -> Result<KvEventBatch, DecodeError> {
    let mut reader = rmp_serde::Deserializer::new(Cursor::new(payload));
    let decoded = KvEventBatch::deserialize(&mut reader)?;
    let left = payload.len() - reader.get_ref().position() as usize;
    if left > 0 { Err(DecodeError::Trailing { left }) } else { Ok(decoded) }
}

/// Why a payload is not a batch of events.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// It is not MessagePack, or not of this shape.
    #[error("not a batch of KV events: {0}")]
    Shape(#[from] rmp_serde::decode::Error),
    /// Something follows it.
    #[error("{left} bytes follow the batch")]
    Trailing {
        /// How many.
        left: usize,
    },
}
