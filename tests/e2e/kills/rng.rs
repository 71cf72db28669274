//! Random number generator of a kill test: splitmix64 (Steele, Lea and Flood, 2014).

/// Reproducible random numbers: splitmix64 of a seed.
#[derive(Debug, Clone)]
pub(super) struct KillTestRng(u64);

impl KillTestRng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let y = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let y = (y ^ (y >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        y ^ (y >> 31)
    }

    /// A random number below `end`, which must be small, because the modulo is slightly biased.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.bits() % end
    }

    /// True with probability `percent` / 100.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}
