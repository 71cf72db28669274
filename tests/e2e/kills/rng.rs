//! The one source of chance of a drill: splitmix64 (Steele, Lea and Flood, 2014).

/// A stream of numbers that a seed fixes.
#[derive(Debug, Clone)]
pub(super) struct KillDrillRng(u64);

impl KillDrillRng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let y = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let y = (y ^ (y >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        y ^ (y >> 31)
    }

    /// A number below `end`, which is small.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.bits() % end
    }

    /// Whether something happens that happens so often in a hundred.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}
