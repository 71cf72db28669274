//! KV blocks, block tables and the prefix index; counts, never touches a device.
//!
//! Owns which block is vacant, cached or in use, who holds it, and under which hash it can be found.
//! Knows no request's text, no time and no device: blocks are numbers, contents are token ids.

mod config;
mod hash;
mod planted;

pub use config::{KvConfig, KvError};
pub use hash::{BlockKey, ExtraKeys, Hasher, MediaItem, PromptHasher};
pub use planted::{Bug, Planted};
