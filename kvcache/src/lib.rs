//! KV blocks, block tables, state slots and the prefix index, without access to a device.
//!
//! The crate tracks which blocks are free, cached or in use, their reference counts, and their hashes in the
//! prefix index. It represents blocks by ids and block contents by token ids. The caller sets the current
//! time, which affects no decision.

#![forbid(unsafe_code)]

mod block_lifetime;
mod block_pool;
mod block_table;
mod cache;
mod cache_group;
mod config;
mod free_block_set;
mod hash;
mod lru;
mod prefix_index;
mod state_cache;
mod state_pool;
mod state_slots;

pub use block_lifetime::{BlockLifetime, LifetimeSampleRate};
pub use block_table::{BlockTable, BlockTables};
pub use cache::{
    BlockCounts, KvCache, PrefixCacheInsertOutcome, PrefixHit, SequenceContent, TableEntries,
};
pub use cache_group::WindowCheckpoints;
pub use config::{KvConfig, KvConfigError};
pub use hash::{BlockHasher, BlockKey, ExtraKeys, MediaItem, PromptHasher};
pub use state_cache::StateCache;
pub use state_pool::StateSlotCounts;
pub use state_slots::{StateRow, StateSlots};

#[cfg(test)]
mod group_tests;
#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod state_tests;
