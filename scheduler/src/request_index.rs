//! Where each live request is. Read at submit, abort and end, never in the middle of a step.

use crate::slab::SlabSlot;
use protocol::RequestId;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Request to replica and slot. Its iteration order reaches no decision.
pub(crate) type RequestIndex =
    HashMap<RequestId, RequestLocation, BuildHasherDefault<RequestIdHasher>>;

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestLocation {
    pub(crate) replica: usize,
    pub(crate) slot: SlabSlot,
}

/// One multiplication: ids are drawn by this process, nobody chooses them to collide.
#[derive(Debug, Default)]
pub(crate) struct RequestIdHasher {
    state: u64,
}

impl Hasher for RequestIdHasher {
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
    fn request_ids_hash_to_distinct_values() {
        let hasher = BuildHasherDefault::<RequestIdHasher>::default();
        let places = [1, 2, 1 << 63].map(|id| hasher.hash_one(RequestId(id)));
        assert!(places[0] != places[1] && places[0] != places[2] && places[1] != places[2]);
    }
}
