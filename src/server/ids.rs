//! Unpredictable numbers for request ids and seeds: SipHash of a counter under a key the operating
//! system drew at start.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// A source of unpredictable numbers; share one per process.
#[derive(Debug, Default)]
pub struct Random {
    key: RandomState,
    next: AtomicU64,
}

impl Random {
    /// The next number.
    pub fn next_u64(&self) -> u64 {
        self.key.hash_one(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A fresh request id: 32 hex digits.
    pub fn id(&self) -> String {
        format!("{:016x}{:016x}", self.next_u64(), self.next_u64())
    }
}

/// One output of splitmix64 from `state`.
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Key of a choice's random numbers: `mix(mix(seed) ^ choice)`.
pub fn sampling_key(seed: u64, choice: u64) -> u64 {
    mix(mix(seed) ^ choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_the_published_vectors() {
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(sampling_key(42, 0), 0x57e1_faba_6510_7204);
    }
}
