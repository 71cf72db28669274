//! Configuration of a KV cache.

use crate::{BlockHasher, LifetimeSampleRate};
use protocol::{KvGroup, KvKind, KvSpec};

/// Smallest number of state slots per group: a request references the checkpoint of its prefix hit, a live slot and a
/// spare slot.
const STATE_SLOTS_MIN: u32 = 3;

/// Configuration of one replica's KV cache.
#[derive(Debug, Clone)]
pub struct KvConfig {
    /// KV layout of the model.
    pub spec: KvSpec,
    /// Number of blocks in the pool.
    pub blocks: u32,
    /// Number of state slots in the pool of each state group; 0 without state groups.
    pub state_slots: u32,
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
    /// Returns the configuration of a pool of `blocks` blocks with prefix caching and 64-bit hashes, without state
    /// slots.
    pub fn new(spec: KvSpec, blocks: u32, guard_key: [u64; 2]) -> Self {
        Self {
            spec,
            blocks,
            state_slots: 0,
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
    /// groups outside 1 to 255, groups out of order, a window without tokens, a group whose blocks have no bytes,
    /// state groups without a group that keeps all positions, a state group with blocks, without bytes or with
    /// several slots per request, or a number of state slots that does not fit the groups.
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
        let rank = |group: &KvGroup| (group.kind.is_state(), group.kind.window().is_some());
        if !self.spec.groups.is_sorted_by_key(rank) {
            return Err(KvConfigError::GroupOrder);
        }
        let is_empty = |group: &KvGroup| group.kind.window() == Some(0);
        if let Some(group) = self.spec.groups.iter().position(is_empty) {
            return Err(KvConfigError::EmptyWindow { group });
        }
        let has_no_bytes = |group: &KvGroup| !group.kind.is_state() && group.bytes_per_block == 0;
        if let Some(group) = self.spec.groups.iter().position(has_no_bytes) {
            return Err(KvConfigError::NoBlockBytes { group });
        }
        if !(1..=64).contains(&self.hash_bits) {
            return Err(KvConfigError::HashBits { bits: self.hash_bits });
        }
        self.validate_states()
    }

    fn validate_states(&self) -> Result<(), KvConfigError> {
        for (index, group) in self.spec.groups.iter().enumerate() {
            let KvKind::State { slots_per_request: slots, bytes_per_slot } = group.kind else {
                continue;
            };
            if !self.spec.groups[0].kind.keeps_all_positions() {
                return Err(KvConfigError::StateWithoutPositions { group: index });
            }
            if slots != 1 {
                return Err(KvConfigError::SlotsPerRequest { group: index, slots });
            }
            if bytes_per_slot == 0 || group.bytes_per_block > 0 {
                let bytes_per_block = group.bytes_per_block;
                return Err(KvConfigError::StateBytes {
                    group: index,
                    bytes_per_slot,
                    bytes_per_block,
                });
            }
        }
        let needed = if self.spec.has_state() { STATE_SLOTS_MIN } else { 0 };
        if self.state_slots < needed || needed == 0 && self.state_slots > 0 {
            return Err(KvConfigError::StateSlotCount { slots: self.state_slots, needed });
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
    /// A window group precedes a group that keeps all positions, or a state group precedes one of these.
    #[error("KV groups that keep all positions must precede window groups, and these state groups")]
    GroupOrder,
    /// A model has a state group, but no group that keeps all positions. Prefix hits of state groups are verified
    /// by the blocks of such a group.
    #[error("KV group {group} stores recurrent state, but no group keeps all positions")]
    StateWithoutPositions {
        /// Index of the state group.
        group: usize,
    },
    /// A state group needs another number of slots per request than 1.
    #[error("state group {group} needs {slots} slots per request, only 1 is supported")]
    SlotsPerRequest {
        /// Index of the group.
        group: usize,
        /// Requested number of slots per request.
        slots: u16,
    },
    /// A state group has slots without bytes, or blocks with bytes.
    #[error(
        "state group {group} has {bytes_per_slot} bytes per slot, must be at least 1, and \
         {bytes_per_block} bytes per block, must be 0"
    )]
    StateBytes {
        /// Index of the group.
        group: usize,
        /// Bytes per state slot.
        bytes_per_slot: u64,
        /// Bytes per block.
        bytes_per_block: u64,
    },
    /// There are too few state slots for one request, or state slots without state groups.
    #[error("{slots} state slots per state group, needed: {needed}")]
    StateSlotCount {
        /// Configured number of slots.
        slots: u32,
        /// Smallest valid number; 0 = the model has no state groups, and no slots are valid.
        needed: u32,
    },
    /// The blocks of a group have no bytes.
    #[error("KV group {group} has 0 bytes per block, only state groups may")]
    NoBlockBytes {
        /// Index of the group.
        group: usize,
    },
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
        let mut no_bytes = config(1, 1, 2, 1);
        no_bytes.spec.groups[1].bytes_per_block = 0;
        assert_eq!(no_bytes.validate(), Err(KvConfigError::NoBlockBytes { group: 1 }));
    }

    /// Returns a configuration with a full group, a window group and a group of the kind `kind`.
    fn hybrid(kind: KvKind, state_slots: u32) -> KvConfig {
        let mut config = KvConfig { state_slots, ..config(1, 1, 3, 64) };
        config.spec.groups[1].kind = KvKind::Window { tokens: 4 };
        config.spec.groups[2] = KvGroup { layers: vec![1], kind, bytes_per_block: 0 };
        config
    }

    #[test]
    fn invalid_state_groups_are_rejected() {
        let state =
            |slots_per_request, bytes_per_slot| KvKind::State { slots_per_request, bytes_per_slot };
        assert_eq!(hybrid(state(1, 9), 3).validate(), Ok(()));
        for (bad, why) in [
            (hybrid(state(1, 9), 2), KvConfigError::StateSlotCount { slots: 2, needed: 3 }),
            (
                KvConfig { state_slots: 3, ..config(1, 1, 1, 64) },
                KvConfigError::StateSlotCount { slots: 3, needed: 0 },
            ),
            (hybrid(state(2, 9), 3), KvConfigError::SlotsPerRequest { group: 2, slots: 2 }),
            (
                hybrid(state(1, 0), 3),
                KvConfigError::StateBytes { group: 2, bytes_per_slot: 0, bytes_per_block: 0 },
            ),
        ] {
            assert_eq!(bad.validate(), Err(why));
        }
        let mut swapped = hybrid(state(1, 9), 3);
        swapped.spec.groups.swap(1, 2);
        assert_eq!(swapped.validate(), Err(KvConfigError::GroupOrder));
        let mut no_kept = hybrid(state(1, 9), 3);
        no_kept.spec.groups.remove(0);
        assert_eq!(no_kept.validate(), Err(KvConfigError::StateWithoutPositions { group: 1 }));
    }
}
