//! Encoder of KV events: maps with the same bytes as msgspec for the classes of vLLM 0.33, or the arrays of
//! earlier versions.

use super::config::KvEventFormat;
use protocol::{BlockHash, ExtraKey, KvEvent, KvKind, Token};
use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_str, write_uint};
use std::io;

/// MessagePack header of a map with a 16-bit length. msgspec derives the header of `BlockStored` from its 16
/// declared keys, however few are written.
const MAP_16: u8 = 0xde;

/// Encoder for the events of one replica.
#[derive(Debug, Clone)]
pub struct KvEventEncoder {
    /// Whether events are encoded as maps or as arrays.
    pub format: KvEventFormat,
    /// DP rank of the replica.
    pub rank: u16,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Storage medium of the blocks: `GPU` for the primary tier of any device.
    pub medium: &'static str,
    /// Kind of each KV cache group; omitted from events of groups beyond the list.
    pub kinds: Vec<KvKind>,
    /// Whether events include token ids.
    pub token_ids: bool,
}

impl KvEventEncoder {
    /// Encodes a batch as `[ts, [event, ..], rank]`: `ts` is its time in seconds of Unix time, `rank` the DP
    /// rank.
    pub fn batch(&self, ts: f64, events: &[KvEvent]) -> io::Result<Vec<u8>> {
        let mut out = Vec::with_capacity(64 + 256 * events.len());
        write_array_len(&mut out, 3)?;
        write_f64(&mut out, ts)?;
        write_array_len(&mut out, events.len() as u32)?;
        for event in events {
            match self.format {
                KvEventFormat::Map => self.map(&mut out, event)?,
                KvEventFormat::Array => self.array(&mut out, event)?,
            }
        }
        write_uint(&mut out, self.rank.into())?;
        Ok(out)
    }

    fn map(&self, out: &mut Vec<u8>, event: &KvEvent) -> io::Result<()> {
        match event {
            KvEvent::Stored { hashes, parent, tokens, extra_keys, group } => {
                let kind = self.kinds.get(usize::from(*group)).copied();
                let window = kind.and_then(KvKind::window);
                let extra = has_extra_keys(extra_keys);
                let optional = [extra, kind.is_some(), window.is_some()];
                let keys = 9 + optional.into_iter().filter(|present| *present).count() as u16;
                out.push(MAP_16);
                out.extend(keys.to_be_bytes());
                write_key_value(out, "type", "BlockStored")?;
                write_str(out, "block_hashes")?;
                write_hashes(out, hashes)?;
                write_str(out, "parent_block_hash")?;
                write_parent(out, *parent)?;
                write_str(out, "token_ids")?;
                self.write_tokens(out, tokens)?;
                write_str(out, "block_size")?;
                write_uint(out, self.block_tokens.into())?;
                write_str(out, "lora_id")?;
                write_nil(out)?;
                write_key_value(out, "medium", self.medium)?;
                write_str(out, "lora_name")?;
                write_lora(out, extra_keys)?;
                if extra {
                    write_str(out, "extra_keys")?;
                    write_extra_keys(out, extra_keys)?;
                }
                write_str(out, "group_idx")?;
                write_uint(out, (*group).into())?;
                if let Some(kind) = kind {
                    write_key_value(out, "kv_cache_spec_kind", kind_name(kind))?;
                }
                if let Some(window) = window {
                    write_str(out, "kv_cache_spec_sliding_window")?;
                    write_uint(out, window.into())?;
                }
                Ok(())
            }
            KvEvent::Removed { hashes, group } => {
                write_map_len(out, 4)?;
                write_key_value(out, "type", "BlockRemoved")?;
                write_str(out, "block_hashes")?;
                write_hashes(out, hashes)?;
                write_key_value(out, "medium", self.medium)?;
                write_str(out, "group_idx")?;
                write_uint(out, (*group).into())?;
                Ok(())
            }
            KvEvent::Cleared => {
                write_map_len(out, 1)?;
                write_key_value(out, "type", "AllBlocksCleared")
            }
        }
    }

    /// Writes the kind of the group `group`, then its window; nil if absent.
    fn write_group_kind(&self, out: &mut Vec<u8>, group: u8) -> io::Result<()> {
        let kind = self.kinds.get(usize::from(group)).copied();
        write_str_or_nil(out, kind.map(kind_name))?;
        let Some(window) = kind.and_then(KvKind::window) else {
            return write_nil(out);
        };
        write_uint(out, window.into())?;
        Ok(())
    }

    /// Encodes an event as an array: its type, then all fields in order, nil if absent.
    fn array(&self, out: &mut Vec<u8>, event: &KvEvent) -> io::Result<()> {
        match event {
            KvEvent::Stored { hashes, parent, tokens, extra_keys, group } => {
                write_array_start(out, 12, "BlockStored")?;
                write_hashes(out, hashes)?;
                write_parent(out, *parent)?;
                self.write_tokens(out, tokens)?;
                write_uint(out, self.block_tokens.into())?;
                write_nil(out)?; // lora_id
                write_str(out, self.medium)?;
                write_lora(out, extra_keys)?;
                write_extra_keys_or_nil(out, extra_keys)?;
                write_uint(out, (*group).into())?;
                self.write_group_kind(out, *group)
            }
            KvEvent::Removed { hashes, group } => {
                write_array_start(out, 4, "BlockRemoved")?;
                write_hashes(out, hashes)?;
                write_str(out, self.medium)?;
                write_uint(out, (*group).into())?;
                Ok(())
            }
            KvEvent::Cleared => write_array_start(out, 1, "AllBlocksCleared"),
        }
    }

    fn write_tokens(&self, out: &mut Vec<u8>, tokens: &[Token]) -> io::Result<()> {
        let tokens = if self.token_ids { tokens } else { &[] };
        write_array_len(out, tokens.len() as u32)?;
        for &token in tokens {
            write_uint(out, token.into())?;
        }
        Ok(())
    }
}

/// Attention kind of a KV cache group, in vLLM's terms.
const fn kind_name(kind: KvKind) -> &'static str {
    match kind {
        KvKind::Full => "full_attention",
        KvKind::Mla => "mla_attention",
        KvKind::Window { .. } => "sliding_window",
        KvKind::State { .. } => "mamba",
    }
}

/// Writes the start of an event array: its length `len`, and its first element, the type of the event.
fn write_array_start(out: &mut Vec<u8>, len: u32, event_type: &str) -> io::Result<()> {
    write_array_len(out, len)?;
    Ok(write_str(out, event_type)?)
}

fn write_key_value(out: &mut Vec<u8>, key: &str, value: &str) -> io::Result<()> {
    write_str(out, key)?;
    Ok(write_str(out, value)?)
}

fn write_hashes(out: &mut Vec<u8>, hashes: &[BlockHash]) -> io::Result<()> {
    write_array_len(out, hashes.len() as u32)?;
    for hash in hashes {
        write_uint(out, hash.0)?;
    }
    Ok(())
}

fn write_parent(out: &mut Vec<u8>, parent: Option<BlockHash>) -> io::Result<()> {
    match parent {
        Some(parent) => write_uint(out, parent.0).map(drop)?,
        None => write_nil(out)?,
    }
    Ok(())
}

fn has_extra_keys(extra_keys: &[Vec<ExtraKey>]) -> bool {
    extra_keys.iter().any(|keys| !keys.is_empty())
}

/// Writes the LoRA name of an event, nil without an adapter. All blocks of an event have the same adapter,
/// so the first LoRA key found is used.
fn write_lora(out: &mut Vec<u8>, extra_keys: &[Vec<ExtraKey>]) -> io::Result<()> {
    let name = extra_keys.iter().flatten().find_map(|key| match key {
        ExtraKey::Lora(name) => Some(name.as_ref()),
        ExtraKey::Salt(_) => None,
    });
    write_str_or_nil(out, name)
}

/// Writes a string as MessagePack, or nil for `None`.
fn write_str_or_nil(out: &mut Vec<u8>, value: Option<&str>) -> io::Result<()> {
    match value {
        Some(value) => write_str(out, value)?,
        None => write_nil(out)?,
    }
    Ok(())
}

/// Writes the extra keys of an event's blocks, or nil if no block has any.
fn write_extra_keys_or_nil(out: &mut Vec<u8>, extra_keys: &[Vec<ExtraKey>]) -> io::Result<()> {
    if has_extra_keys(extra_keys) {
        return write_extra_keys(out, extra_keys);
    }
    write_nil(out)
}

/// Writes the extra keys of an event's blocks: an array with one entry per block, which is the array of
/// the block's extra keys, or nil if the block has none.
fn write_extra_keys(out: &mut Vec<u8>, extra_keys: &[Vec<ExtraKey>]) -> io::Result<()> {
    write_array_len(out, extra_keys.len() as u32)?;
    for keys in extra_keys {
        if keys.is_empty() {
            write_nil(out)?;
            continue;
        }
        write_array_len(out, keys.len() as u32)?;
        for ExtraKey::Lora(text) | ExtraKey::Salt(text) in keys {
            write_str(out, text)?;
        }
    }
    Ok(())
}
