//! Lifetimes of a sample of the blocks, from allocation to eviction.
//!
//! Sampling and metrics follow vLLM (`vllm/v1/core/kv_cache_metrics.py`), except that a block counts as
//! evicted only if it leaves the prefix index: freeing an uncached block evicts no content.

/// Number of recent uses recorded per block, as in vLLM.
const TRACKED_USES: usize = 4;

/// Fraction of block allocations whose lifetimes are recorded, above 0 and at most 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LifetimeSampleRate {
    /// An allocation is sampled if the 64-bit hash of its sequence number is at most this threshold.
    threshold: u64,
}

impl LifetimeSampleRate {
    /// Returns `None` unless `fraction` is above 0 and at most 1.
    #[must_use]
    pub fn new(fraction: f64) -> Option<Self> {
        let threshold = fraction * 2.0_f64.powi(64);
        (fraction > 0.0 && fraction <= 1.0).then_some(Self { threshold: threshold as u64 })
    }

    /// Returns whether the allocation with sequence number `allocation` is sampled. The decision uses a hash
    /// of the sequence number instead of a random number; both are uniformly distributed.
    ///
    /// The hash is the finalizer of `SplitMix64` (Steele, Lea, Flood, "Fast splittable pseudorandom number
    /// generators", OOPSLA 2014).
    fn is_sampled(self, allocation: u64) -> bool {
        let z = allocation.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) <= self.threshold
    }
}

/// Lifetime of a block from allocation to eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLifetime {
    /// Milliseconds from allocation to eviction.
    pub lifetime_ms: u64,
    /// Milliseconds since the last use, or since allocation if the block was never used.
    pub idle_ms: u64,
    /// Milliseconds between consecutive uses, oldest first. At most the last four uses are recorded, which
    /// gives at most three values.
    pub reuse_gaps_ms: Vec<u64>,
}

/// Allocation time and last use times of a block whose lifetime is recorded. A use is a prefix hit, or the
/// deduplication of an equal block.
#[derive(Debug, Clone)]
struct SampledBlock {
    allocated_ms: u64,
    /// Times of the last uses: use number n is at index n modulo `TRACKED_USES`.
    uses_ms: [u64; TRACKED_USES],
    uses: usize,
}

impl SampledBlock {
    fn finish(&self, now_ms: u64) -> BlockLifetime {
        let recorded = self.uses.saturating_sub(TRACKED_USES)..self.uses;
        let last: Vec<u64> = recorded.map(|use_| self.uses_ms[use_ % TRACKED_USES]).collect();
        BlockLifetime {
            lifetime_ms: now_ms - self.allocated_ms,
            idle_ms: now_ms - last.last().unwrap_or(&self.allocated_ms),
            reuse_gaps_ms: last.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        }
    }
}

/// Tracks the sampled blocks that are in use or cached, and collects the lifetimes of evicted sampled blocks.
#[derive(Debug)]
pub(crate) struct LifetimeSampler {
    rate: LifetimeSampleRate,
    now_ms: u64,
    /// Number of block allocations so far; it is the sequence number from which `LifetimeSampleRate` decides
    /// whether an allocation is sampled.
    allocations: u64,
    sampled: Vec<Option<Box<SampledBlock>>>,
    finished: Vec<BlockLifetime>,
}

impl LifetimeSampler {
    pub(crate) fn new(rate: LifetimeSampleRate, blocks: u32) -> Self {
        let sampled = vec![None; blocks as usize];
        Self { rate, now_ms: 0, allocations: 0, sampled, finished: Vec::new() }
    }

    /// Sets the current time. A time before the current time is ignored.
    pub(crate) fn set_time(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    pub(crate) fn on_allocated(&mut self, block: u32) {
        self.allocations += 1;
        if self.rate.is_sampled(self.allocations) {
            let allocated_ms = self.now_ms;
            let sample = SampledBlock { allocated_ms, uses_ms: [0; TRACKED_USES], uses: 0 };
            self.sampled[block as usize] = Some(Box::new(sample));
        }
    }

    #[inline]
    pub(crate) fn on_used(&mut self, block: u32) {
        if let Some(sample) = &mut self.sampled[block as usize] {
            sample.uses_ms[sample.uses % TRACKED_USES] = self.now_ms;
            sample.uses += 1;
        }
    }

    pub(crate) fn on_evicted(&mut self, block: u32) {
        if let Some(sample) = self.sampled[block as usize].take() {
            self.finished.push(sample.finish(self.now_ms));
        }
    }

    /// Stops sampling a block that was freed without eviction.
    pub(crate) fn forget(&mut self, block: u32) {
        self.sampled[block as usize] = None;
    }

    pub(crate) fn has_lifetimes(&self) -> bool {
        !self.finished.is_empty()
    }

    pub(crate) fn take_lifetimes(&mut self) -> Vec<BlockLifetime> {
        std::mem::take(&mut self.finished)
    }

    /// Panics if a free block is sampled.
    pub(crate) fn check(&self, is_free: impl Fn(u32) -> bool) {
        for (block, sample) in (0..).zip(&self.sampled) {
            assert!(sample.is_none() || !is_free(block), "free block {block} is sampled");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_rate_is_in_zero_to_one() {
        assert_eq!([0.0, -0.1, 1.001, f64::NAN].map(LifetimeSampleRate::new), [None; 4]);
        let all = LifetimeSampleRate::new(1.0).unwrap();
        assert!((0..10_000).all(|allocation| all.is_sampled(allocation)));
        for fraction in [0.5, 0.01, 0.001] {
            let rate = LifetimeSampleRate::new(fraction).unwrap();
            let count =
                (1..=1_000_000).filter(|&allocation| rate.is_sampled(allocation)).count() as f64;
            let expected = 1e6 * fraction;
            let sigma = (expected * (1.0 - fraction)).sqrt();
            assert!((count - expected).abs() < 4.0 * sigma, "{count} of {expected}");
        }
        // Requests have a hundred blocks each; every block position of a request is sampled about equally
        // often.
        let rate = LifetimeSampleRate::new(0.1).unwrap();
        let at_position =
            |position| (0..1_000).filter(|n: &u64| rate.is_sampled(100 * n + position)).count();
        assert!((0..100).map(at_position).all(|count| (50..=150).contains(&count)));
    }

    /// Checks that the hashes equal the first outputs of `SplitMix64` with seed 0.
    #[test]
    fn sampling_uses_the_splitmix64_finalizer() {
        let hashes = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        for (allocation, threshold) in (1..).zip(hashes) {
            assert!(LifetimeSampleRate { threshold }.is_sampled(allocation));
            assert!(
                !LifetimeSampleRate { threshold: threshold - 1 }.is_sampled(allocation),
                "{allocation}"
            );
        }
    }

    #[test]
    fn block_lifetime_reports_idle_time_and_reuse_gaps() {
        let mut sampler = LifetimeSampler::new(LifetimeSampleRate::new(1.0).unwrap(), 2);
        sampler.set_time(100);
        sampler.on_allocated(0);
        sampler.on_allocated(1);
        for now_ms in [110, 130, 170, 250, 410] {
            sampler.set_time(now_ms);
            sampler.on_used(0);
        }
        sampler.set_time(400); // Earlier times are ignored.
        sampler.on_used(0);
        sampler.set_time(1_000);
        sampler.on_evicted(1);
        sampler.on_evicted(0);
        sampler.on_evicted(0); // Already evicted.
        let never_used =
            BlockLifetime { lifetime_ms: 900, idle_ms: 900, reuse_gaps_ms: Vec::new() };
        let used =
            BlockLifetime { lifetime_ms: 900, idle_ms: 590, reuse_gaps_ms: vec![80, 160, 0] };
        assert_eq!(sampler.take_lifetimes(), [never_used, used]);
        assert!(!sampler.has_lifetimes());
        sampler.on_allocated(0);
        sampler.forget(0);
        sampler.on_evicted(0);
        assert!(!sampler.has_lifetimes(), "freeing is not an eviction");
    }

    #[test]
    #[should_panic(expected = "free block 1 is sampled")]
    fn check_detects_a_sampled_free_block() {
        let mut sampler = LifetimeSampler::new(LifetimeSampleRate::new(1.0).unwrap(), 2);
        sampler.on_allocated(1);
        sampler.check(|_| true);
    }
}
