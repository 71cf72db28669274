//! Random number generator of the simulator: xoshiro256++ seeded through splitmix64. All random decisions of
//! a simulation use generators that are seeded with its seed.
//!
//! Source: Blackman and Vigna, "Scrambled linear pseudorandom number generators", 2019.

/// Reproducible random numbers of a simulation.
#[derive(Debug, Clone)]
pub(crate) struct SimRng([u64; 4]);

impl SimRng {
    /// Creates the random number generator of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let mut x = seed;
        Self(std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let y = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let y = (y ^ (y >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            y ^ (y >> 31)
        }))
    }

    /// Returns the next 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let out = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let t = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= t;
        *d = d.rotate_left(45);
        out
    }

    /// Returns a random number in `[0, end)`; 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// Returns a random number in `[low, high]`.
    pub(crate) fn between(&mut self, low: u32, high: u32) -> u32 {
        low + self.below(u64::from(high.saturating_sub(low)) + 1) as u32
    }

    /// Returns a random number in `[low, high]` with a log-uniform distribution, so small numbers are common.
    pub(crate) fn scaled(&mut self, low: u32, high: u32) -> u32 {
        let (a, b) = (f64::from(low.max(1)).ln(), f64::from(high.max(1) + 1).ln());
        let unit = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        ((a + unit * (b - a)).exp() as u32).clamp(low, high)
    }

    /// Returns true with probability `per_mille / 1000`. Uses no random bits if `per_mille` is 0, so that a
    /// disabled fault does not change the other random decisions of a seed.
    pub(crate) fn chance_per_mille(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// Returns a random element of `items`.
    pub(crate) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}
