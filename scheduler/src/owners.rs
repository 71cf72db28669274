//! Where each live request is. Read at submit, abort and end, never in the middle of a step.

use crate::slab::Slot;
use protocol::RequestId;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Request to replica and slot. Its iteration order reaches no decision.
pub(crate) type Owners = HashMap<RequestId, Place, BuildHasherDefault<IdHasher>>;

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) replica: usize,
    pub(crate) slot: Slot,
}

/// One multiplication: ids are drawn by this process, nobody chooses them to collide.
#[derive(Debug, Default)]
pub(crate) struct IdHasher {
    state: u64,
}

impl Hasher for IdHasher {
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
    use std::hash::BuildHasher;

    #[test]
    fn ids_fall_into_places_of_their_own() {
        let hasher = BuildHasherDefault::<IdHasher>::default();
        let places = [1, 2, 1 << 63].map(|id| hasher.hash_one(RequestId(id)));
        assert!(places[0] != places[1] && places[0] != places[2] && places[1] != places[2]);
    }
}
