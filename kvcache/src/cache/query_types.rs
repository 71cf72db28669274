//! Contents of queries to the KV cache, and their results: prefix hits, outcomes and block counts.

use crate::{BlockKey, ExtraKeys};
use protocol::Token;
use std::sync::Arc;

/// Token ids and keys that identify the content of a request's blocks.
#[derive(Debug, Clone, Copy)]
pub struct SequenceContent<'a> {
    /// Token ids from position 0.
    pub tokens: &'a [Token],
    /// Keys of the full blocks; full blocks without a key are neither looked up nor registered.
    pub block_keys: &'a [BlockKey],
    /// Extra keys that the content depends on (adapter, cache salt, media).
    pub extra_keys: Option<&'a Arc<ExtraKeys>>,
}

/// Number of entries in the block tables of groups that keep all positions, and in those of window groups. The
/// tables of a request have equal numbers of entries within each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableEntries {
    /// Number for each group that keeps all positions.
    pub kept: u32,
    /// Number for each window group.
    pub windowed: u32,
}

impl TableEntries {
    /// Returns the same number for all groups.
    pub const fn all(entries: u32) -> Self {
        Self { kept: entries, windowed: entries }
    }
}

/// Result of a prefix lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixHit {
    /// Number of leading blocks that all groups have.
    pub blocks: u32,
    /// Number of blocks found in all groups together: window groups need the last blocks of the hit only.
    pub found: u32,
    /// Number of found blocks that no block table references. Adding a reference to such a block reduces the
    /// number of available blocks.
    pub evictable: u32,
    /// Number of leading blocks that the groups which keep all positions have; `blocks` without such groups.
    pub wanted: u32,
    /// The group whose missing window or checkpoint shortened the hit to less than `wanted`, the last of them.
    pub cut_by: Option<u8>,
    /// Number of state slots in each group by which a reference to the checkpoint of the hit reduces the available
    /// slots.
    pub evictable_states: u32,
}

/// Outcome of `KvCache::publish`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixCacheInsertOutcome {
    /// The block is in the prefix index.
    Stored,
    /// The prefix index already had an equal block, which replaced the block in the block table.
    Deduplicated,
    /// The preceding block of the table is not in the prefix index, or a different block has the same hash.
    /// No further blocks of the table can be registered, except in window groups.
    Rejected,
}

/// Blocks by state; free + cached + in use = pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Number of blocks in the pool.
    pub pool: u32,
    /// Unreferenced blocks that are not in the prefix index.
    pub free: u32,
    /// Unreferenced blocks that are in the prefix index.
    pub cached: u32,
    /// Blocks referenced by tables.
    pub in_use: u32,
}
