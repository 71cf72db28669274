//! KV blocks, block tables and the prefix index; counts, never touches a device.
//!
//! Owns which block is vacant, cached or in use, who holds it, and under which hash it can be found.
//! Knows no request's text and no device: blocks are numbers, contents are token ids. Time is what it is told
//! and decides nothing.

#![forbid(unsafe_code)]

mod block_lifetime;
mod block_pool;
mod block_table;
mod cache;
mod config;
mod fault_injection;
mod free_block_set;
mod hash;
mod lru;
mod prefix_index;

pub use block_lifetime::{BlockLifetime, SampleRate};
pub use block_table::BlockTable;
pub use cache::{BlockCounts, KvCache, PrefixHit, PublishOutcome, SequenceContent};
pub use config::{KvConfig, KvConfigError};
pub use fault_injection::{FaultInjection, InjectedFault};
pub use hash::{BlockHasher, BlockKey, ExtraKeys, MediaItem, PromptHasher};

#[cfg(test)]
mod reference_tests;
