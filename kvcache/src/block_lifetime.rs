//! How long blocks stay: a sample of them is followed from being taken to being evicted.
//!
//! Sampled and measured as vLLM does (`vllm/v1/core/kv_cache_metrics.py`), but that only what leaves the
//! index is an eviction: a block that becomes vacant took nothing from anybody.

/// Uses of a block that are remembered, as many as vLLM does.
const TRACKED_USES: usize = 4;

/// A share of all blocks, above 0 and at most 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleRate {
    /// Of 2^64 numbers, the greatest that is part of it.
    threshold: u64,
}

impl SampleRate {
    /// `None` if it is not above 0 and at most 1.
    #[must_use]
    pub fn new(fraction: f64) -> Option<Self> {
        let numbers = fraction * 2.0_f64.powi(64);
        (fraction > 0.0 && fraction <= 1.0).then_some(Self { threshold: numbers as u64 })
    }

    /// Whether the `turn`th block is part of it: no random number, but as evenly spread as one.
    ///
    /// The finalizer of `SplitMix64` (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    /// OOPSLA 2014).
    fn is_sampled(self, turn: u64) -> bool {
        let z = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) <= self.threshold
    }
}

/// The time of a block from when it was taken to its eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLifetime {
    /// All of it, in milliseconds.
    pub lifetime_ms: u64,
    /// Since its last use, or since it was taken if nobody ever found it.
    pub idle_ms: u64,
    /// Between its last uses, oldest first; of the last four uses, thus at most three.
    pub reuse_gaps_ms: Vec<u64>,
}

/// A block that is followed. A use is a prefix hit, or an equal block that gave way to it.
#[derive(Debug, Clone)]
struct SampledBlock {
    allocated_ms: u64,
    /// The last uses, each in the place of its number.
    uses_ms: [u64; TRACKED_USES],
    uses: usize,
}

impl SampledBlock {
    fn finish(&self, now_ms: u64) -> BlockLifetime {
        let kept = self.uses.saturating_sub(TRACKED_USES)..self.uses;
        let last: Vec<u64> = kept.map(|use_| self.uses_ms[use_ % TRACKED_USES]).collect();
        BlockLifetime {
            lifetime_ms: now_ms - self.allocated_ms,
            idle_ms: now_ms - last.last().unwrap_or(&self.allocated_ms),
            reuse_gaps_ms: last.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        }
    }
}

/// The sample, and the stays that are over.
#[derive(Debug)]
pub(crate) struct LifetimeSampler {
    rate: SampleRate,
    now_ms: u64,
    /// Blocks taken so far.
    allocations: u64,
    sampled: Vec<Option<Box<SampledBlock>>>,
    finished: Vec<BlockLifetime>,
}

impl LifetimeSampler {
    pub(crate) fn new(share: SampleRate, blocks: u32) -> Self {
        let followed = vec![None; blocks as usize];
        Self { rate: share, now_ms: 0, allocations: 0, sampled: followed, finished: Vec::new() }
    }

    /// Time never goes back.
    pub(crate) fn set_time(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    pub(crate) fn on_allocated(&mut self, block: u32) {
        self.allocations += 1;
        if self.rate.is_sampled(self.allocations) {
            let taken_ms = self.now_ms;
            let followed =
                SampledBlock { allocated_ms: taken_ms, uses_ms: [0; TRACKED_USES], uses: 0 };
            self.sampled[block as usize] = Some(Box::new(followed));
        }
    }

    #[inline]
    pub(crate) fn on_used(&mut self, block: u32) {
        if let Some(followed) = &mut self.sampled[block as usize] {
            followed.uses_ms[followed.uses % TRACKED_USES] = self.now_ms;
            followed.uses += 1;
        }
    }

    pub(crate) fn on_evicted(&mut self, block: u32) {
        if let Some(followed) = self.sampled[block as usize].take() {
            self.finished.push(followed.finish(self.now_ms));
        }
    }

    /// The block became vacant.
    pub(crate) fn forget(&mut self, block: u32) {
        self.sampled[block as usize] = None;
    }

    pub(crate) fn has_lifetimes(&self) -> bool {
        !self.finished.is_empty()
    }

    pub(crate) fn take_lifetimes(&mut self) -> Vec<BlockLifetime> {
        std::mem::take(&mut self.finished)
    }

    /// Panics if a vacant block is followed.
    pub(crate) fn check(&self, vacant: impl Fn(u32) -> bool) {
        for (block, followed) in (0..).zip(&self.sampled) {
            assert!(followed.is_none() || !vacant(block), "vacant block {block} is followed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_rate_is_in_zero_to_one() {
        assert_eq!([0.0, -0.1, 1.001, f64::NAN].map(SampleRate::new), [None; 4]);
        let all = SampleRate::new(1.0).unwrap();
        assert!((0..10_000).all(|turn| all.is_sampled(turn)));
        for fraction in [0.5, 0.01, 0.001] {
            let share = SampleRate::new(fraction).unwrap();
            let held = (1..=1_000_000).filter(|&turn| share.is_sampled(turn)).count() as f64;
            let expected = 1e6 * fraction;
            let sigma = (expected * (1.0 - fraction)).sqrt();
            assert!((held - expected).abs() < 4.0 * sigma, "{held} of {expected}");
        }
        // Requests of a hundred blocks: no place in them is followed more than others by much.
        let share = SampleRate::new(0.1).unwrap();
        let of_place =
            |place| (0..1_000).filter(|n: &u64| share.is_sampled(100 * n + place)).count();
        assert!((0..100).map(of_place).all(|held| (50..=150).contains(&held)));
    }

    /// The first numbers of `SplitMix64` with seed 0.
    #[test]
    fn sampling_uses_the_splitmix64_finalizer() {
        let numbers = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        for (turn, greatest) in (1..).zip(numbers) {
            assert!(SampleRate { threshold: greatest }.is_sampled(turn));
            assert!(!SampleRate { threshold: greatest - 1 }.is_sampled(turn), "{turn}");
        }
    }

    #[test]
    fn block_lifetime_reports_idle_time_and_reuse_gaps() {
        let mut residency = LifetimeSampler::new(SampleRate::new(1.0).unwrap(), 2);
        residency.set_time(100);
        residency.on_allocated(0);
        residency.on_allocated(1);
        for now_ms in [110, 130, 170, 250, 410] {
            residency.set_time(now_ms);
            residency.on_used(0);
        }
        residency.set_time(400); // A clock that goes back stands still.
        residency.on_used(0);
        residency.set_time(1_000);
        residency.on_evicted(1);
        residency.on_evicted(0);
        residency.on_evicted(0); // Over already.
        let never_used =
            BlockLifetime { lifetime_ms: 900, idle_ms: 900, reuse_gaps_ms: Vec::new() };
        let used =
            BlockLifetime { lifetime_ms: 900, idle_ms: 590, reuse_gaps_ms: vec![80, 160, 0] };
        assert_eq!(residency.take_lifetimes(), [never_used, used]);
        assert!(!residency.has_lifetimes());
        residency.on_allocated(0);
        residency.forget(0);
        residency.on_evicted(0);
        assert!(!residency.has_lifetimes(), "one that became vacant was not evicted");
    }

    #[test]
    #[should_panic(expected = "vacant block 1 is followed")]
    fn check_detects_a_sampled_free_block() {
        let mut residency = LifetimeSampler::new(SampleRate::new(1.0).unwrap(), 2);
        residency.on_allocated(1);
        residency.check(|_| true);
    }
}
