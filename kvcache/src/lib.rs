//! KV blocks, block tables and the prefix index; counts, never touches a device.
//!
//! Owns which block is vacant, cached or in use, who holds it, and under which hash it can be found.
//! Knows no request's text and no device: blocks are numbers, contents are token ids. Time is what it is told
//! and decides nothing.

#![forbid(unsafe_code)]

mod cache;
mod config;
mod hash;
mod index;
mod lru;
mod planted;
mod pool;
mod residency;
mod table;
mod vacant;

pub use cache::{BlockCounts, Content, Hit, KvCache, Published};
pub use config::{KvConfig, KvError};
pub use hash::{BlockKey, ExtraKeys, Hasher, MediaItem, PromptHasher};
pub use planted::{Bug, Planted};
pub use residency::{Share, Stay};
pub use table::Table;

#[cfg(test)]
mod model_tests;
