//! Prefix index: maps each block hash to at most one block. Its capacity is fixed at construction.

use protocol::BlockHash;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

/// Maps block hashes to blocks. The iteration order of the map affects no decision.
#[derive(Debug, Clone)]
pub(crate) struct PrefixIndex {
    blocks: HashMap<BlockHash, u32, KeyedHasherBuilder>,
}

impl PrefixIndex {
    pub(crate) fn new(blocks: u32, secret: u64) -> Self {
        // With twice the capacity of the pool, the hash table reclaims tombstones in place and never grows.
        let blocks =
            HashMap::with_capacity_and_hasher(2 * blocks as usize, KeyedHasherBuilder { secret });
        Self { blocks }
    }

    pub(crate) fn get(&self, hash: BlockHash) -> Option<u32> {
        self.blocks.get(&hash).copied()
    }

    pub(crate) fn insert(&mut self, hash: BlockHash, block: u32) {
        let previous = self.blocks.insert(hash, block);
        assert_eq!(previous, None, "hash {hash:?} of block {block} is already indexed");
    }

    pub(crate) fn remove(&mut self, hash: BlockHash, block: u32) {
        let previous = self.blocks.remove(&hash);
        assert_eq!(previous, Some(block), "hash {hash:?} maps to another block");
    }

    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockHash, u32)> {
        self.blocks.iter().map(|(&hash, &block)| (hash, block))
    }
}

/// Builder of hashers that multiply once, keyed with a secret. The hashed values are block hashes, which are
/// uniformly distributed unless a client forges them; the secret key prevents clients from choosing colliding
/// positions in the hash table.
#[derive(Debug, Clone, Copy)]
struct KeyedHasherBuilder {
    secret: u64,
}

impl BuildHasher for KeyedHasherBuilder {
    type Hasher = KeyedHasher;

    fn build_hasher(&self) -> KeyedHasher {
        KeyedHasher { state: self.secret }
    }
}

/// State of a keyed hash function.
struct KeyedHasher {
    state: u64,
}

impl Hasher for KeyedHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.state ^ value) * 0x9e37_79b9_7f4a_7c15;
        self.state = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_table_positions_depend_on_the_secret() {
        let positions =
            |secret| [1_u64, 2, 1 << 63].map(|hash| KeyedHasherBuilder { secret }.hash_one(hash));
        let [first, second] = [positions(1), positions(2)];
        assert!(first[0] != first[1] && first[0] != first[2] && first[1] != first[2]);
        assert_ne!(first, second, "clients cannot choose colliding hashes");
    }
}
