//! Configuration of a KV cache.

use crate::{BlockHasher, LifetimeSampleRate};
use protocol::{KvGroup, KvSpec};

/// Configuration of one replica's KV cache.
#[derive(Debug, Clone)]
pub struct KvConfig {
    /// KV layout of the model.
    pub spec: KvSpec,
    /// Number of blocks in the pool.
    pub blocks: u32,
    /// Whether prefix caching is enabled.
    pub caching: bool,
    /// Secret key of the private guards (`BlockKey::guard`), drawn once per process; it must never leave the
    /// process.
    pub guard_key: [u64; 2],
    /// Number of bits of the block hash, 1 to 64. Only tests use fewer than 64 bits, because they need hash
    /// collisions.
    pub hash_bits: u8,
    /// Whether changes of the prefix index are recorded for `KvCache::take_events`.
    pub events: bool,
    /// Fraction of blocks whose lifetimes are recorded for `KvCache::take_lifetimes`; ignored without prefix
    /// caching.
    pub lifetime_sample: Option<LifetimeSampleRate>,
}

impl KvConfig {
    /// Returns the configuration of a pool of `blocks` blocks with prefix caching and 64-bit hashes.
    pub fn new(spec: KvSpec, blocks: u32, guard_key: [u64; 2]) -> Self {
        Self {
            spec,
            blocks,
            caching: true,
            guard_key,
            hash_bits: 64,
            events: true,
            lifetime_sample: None,
        }
    }

    /// Validates the configuration.
    ///
    /// Errors: an empty pool, blocks without tokens, a hash size outside 1 to 64 bits, a number of KV cache
    /// groups outside 1 to 255, groups out of order, or a window without tokens.
    pub fn validate(&self) -> Result<(), KvConfigError> {
        let (block_tokens, groups) = (self.spec.block_tokens, self.spec.groups.len());
        if self.blocks == 0 {
            return Err(KvConfigError::NoBlocks);
        }
        if block_tokens == 0 {
            return Err(KvConfigError::NoBlockTokens { block_tokens });
        }
        if !(1..=255).contains(&groups) {
            return Err(KvConfigError::GroupCount { groups });
        }
        let is_window = |group: &KvGroup| group.kind.window().is_some();
        if !self.spec.groups.is_sorted_by_key(is_window) {
            return Err(KvConfigError::GroupOrder);
        }
        let is_empty = |group: &KvGroup| group.kind.window() == Some(0);
        if let Some(group) = self.spec.groups.iter().position(is_empty) {
            return Err(KvConfigError::EmptyWindow { group });
        }
        if !(1..=64).contains(&self.hash_bits) {
            return Err(KvConfigError::HashBits { bits: self.hash_bits });
        }
        Ok(())
    }

    /// Returns the hasher that computes block keys of this cache.
    pub fn block_hasher(&self) -> BlockHasher {
        BlockHasher::new(self.spec.block_tokens, self.guard_key, self.hash_bits)
    }
}

/// Error of an invalid KV cache configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvConfigError {
    /// The pool has no blocks.
    #[error("the KV pool has no blocks")]
    NoBlocks,
    /// A block has no tokens.
    #[error("block_tokens is {block_tokens}, must be at least 1")]
    NoBlockTokens {
        /// Configured tokens per block.
        block_tokens: u32,
    },
    /// The number of KV cache groups is 0 or above 255.
    #[error("a KV layout needs between 1 and 255 groups, got {groups}")]
    GroupCount {
        /// Configured number of groups.
        groups: usize,
    },
    /// A window group precedes a group that keeps all positions.
    #[error("KV groups that keep all positions must precede window groups")]
    GroupOrder,
    /// A window has no tokens.
    #[error("the window of KV group {group} has no tokens")]
    EmptyWindow {
        /// Index of the group.
        group: usize,
    },
    /// The block hash has no bits, or more than 64.
    #[error("a block hash of {bits} bits is not between 1 and 64")]
    HashBits {
        /// Configured number of bits.
        bits: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::KvKind;

    fn config(blocks: u32, block_tokens: u32, groups: usize, hash_bits: u8) -> KvConfig {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens, groups: vec![group; groups] };
        KvConfig { hash_bits, ..KvConfig::new(spec, blocks, [1, 2]) }
    }

    #[test]
    fn empty_cache_configs_are_rejected() {
        for good in [config(1, 1, 1, 1), config(1, 1, 255, 64)] {
            assert_eq!(good.validate(), Ok(()));
        }
        for (bad, why) in [
            (config(0, 1, 1, 64), KvConfigError::NoBlocks),
            (config(1, 0, 1, 64), KvConfigError::NoBlockTokens { block_tokens: 0 }),
            (config(1, 1, 0, 64), KvConfigError::GroupCount { groups: 0 }),
            (config(1, 1, 256, 64), KvConfigError::GroupCount { groups: 256 }),
            (config(1, 1, 1, 0), KvConfigError::HashBits { bits: 0 }),
            (config(1, 1, 1, 65), KvConfigError::HashBits { bits: 65 }),
        ] {
            assert_eq!(bad.validate(), Err(why));
        }
        let mut window = config(1, 1, 2, 1);
        window.spec.groups[1].kind = KvKind::Window { tokens: 1 };
        assert_eq!(window.validate(), Ok(()));
        window.spec.groups.swap(0, 1);
        assert_eq!(window.validate(), Err(KvConfigError::GroupOrder));
        window.spec.groups.swap(0, 1);
        window.spec.groups[1].kind = KvKind::Window { tokens: 0 };
        assert_eq!(window.validate(), Err(KvConfigError::EmptyWindow { group: 1 }));
    }
}
