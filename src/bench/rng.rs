//! Seeded random numbers (SplitMix64; Steele, Lea and Flood, 2014), which make a generated load reproducible.

/// SplitMix64 random number generator for one seed and stream.
#[derive(Debug, Clone)]
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates the generator for a seed and a stream number. Generators with different stream numbers give
    /// independent random numbers.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut this = Self(seed ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93));
        this.next(); // Decorrelates neighbouring seeds.
        this
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in `[low, high)`.
    pub(super) fn uniform(&mut self, low: u32, high: u32) -> u32 {
        let width = u64::from(high.saturating_sub(low).max(1));
        low + ((u128::from(self.next()) * u128::from(width)) >> 64) as u32
    }

    /// Returns an exponentially distributed number with mean 1: the time between two arrivals of a Poisson
    /// process of rate 1.
    pub(super) fn exponential(&mut self) -> f64 {
        let uniform = (self.next() >> 11) as f64 / (1_u64 << 53) as f64; // In `[0, 1)`.
        -(1.0 - uniform).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_range_and_gaps_have_the_right_mean() {
        let mut rng = SplitMix64::new(1, 2);
        assert!((0..1000).all(|_| (5..9).contains(&rng.uniform(5, 9))));
        let mean = (0..100_000).map(|_| rng.exponential()).sum::<f64>() / 1e5;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert_ne!(SplitMix64::new(1, 2).next(), SplitMix64::new(1, 3).next());
    }
}
