//! What a KV cache is built from.

use crate::{BlockHasher, FaultInjection, SampleRate};
use protocol::KvSpec;

/// Size and behaviour of one replica's KV cache.
#[derive(Debug, Clone)]
pub struct KvConfig {
    /// Layout of the model's cache.
    pub spec: KvSpec,
    /// Blocks in the pool.
    pub blocks: u32,
    /// Whether full blocks become findable for other requests.
    pub caching: bool,
    /// Key of the private guard, drawn once per process; it must never leave the process.
    pub guard_key: [u64; 2],
    /// Bits of the block hash that are kept, 1 to 64. Fewer than 64 only in simulations, where
    /// collisions must happen.
    pub hash_bits: u8,
    /// Whether changes of the index are recorded for `KvCache::take_events`.
    pub events: bool,
    /// Share of the blocks whose stays are measured for `KvCache::take_lifetimes`; without caching there are none.
    pub lifetime_sample: Option<SampleRate>,
    /// Bug in force, for simulations of a build with the feature `planted`.
    pub fault_injection: FaultInjection,
}

impl KvConfig {
    /// A cache of `blocks` blocks with prefix caching on and full hashes.
    pub fn new(spec: KvSpec, blocks: u32, guard_key: [u64; 2]) -> Self {
        Self {
            spec,
            blocks,
            caching: true,
            guard_key,
            hash_bits: 64,
            events: true,
            lifetime_sample: None,
            fault_injection: FaultInjection::default(),
        }
    }

    /// Checks what `KvCache::new` would refuse.
    ///
    /// Errors: a pool, block or hash of size zero, or a layout without groups.
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
        if !(1..=64).contains(&self.hash_bits) {
            return Err(KvConfigError::HashBits { bits: self.hash_bits });
        }
        Ok(())
    }

    /// The function that gives blocks of this cache their keys.
    pub fn block_hasher(&self) -> BlockHasher {
        BlockHasher::new(
            self.spec.block_tokens,
            self.guard_key,
            self.hash_bits,
            self.fault_injection,
        )
    }
}

/// Why a cache cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvConfigError {
    /// The pool would be empty.
    #[error("the KV pool has no blocks")]
    NoBlocks,
    /// A block must hold tokens.
    #[error("a KV block of {block_tokens} tokens cannot hold anything")]
    NoBlockTokens {
        /// Tokens per block asked for.
        block_tokens: u32,
    },
    /// Groups are numbered by one byte; all of kind `Full` share one table.
    #[error("a KV layout needs between 1 and 255 groups, got {groups}")]
    GroupCount {
        /// Groups asked for.
        groups: usize,
    },
    /// The hash must keep some bits.
    #[error("a block hash of {bits} bits is not between 1 and 64")]
    HashBits {
        /// Bits asked for.
        bits: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{KvGroup, KvKind};

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
    }
}
