//! Index of live requests by request id. The index is read when a request is submitted, aborted or finished,
//! never during a step.

use crate::slab::SlabSlot;
use protocol::RequestId;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Maps request ids to replica and slab slot (index in the replica's list of requests). The iteration order
/// of the map affects no decision.
pub(crate) type RequestIndex =
    HashMap<RequestId, RequestLocation, BuildHasherDefault<RequestIdHasher>>;

/// Replica of a request, and its slab slot (index in the replica's list of requests).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestLocation {
    pub(crate) replica: usize,
    pub(crate) slot: SlabSlot,
}

/// Hash function with a single multiplication. It suffices because this process generates the ids, so no
/// client can choose colliding ids.
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
        let hashes = [1, 2, 1 << 63].map(|id| hasher.hash_one(RequestId(id)));
        assert!(hashes[0] != hashes[1] && hashes[0] != hashes[2] && hashes[1] != hashes[2]);
    }
}
