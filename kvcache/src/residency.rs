//! How long blocks stay: a sample of them is followed from being taken to being evicted.
//!
//! Sampled and measured as vLLM does (`vllm/v1/core/kv_cache_metrics.py`), but that only what leaves the
//! index is an eviction: a block that becomes vacant took nothing from anybody.

/// Uses of a block that are remembered, as many as vLLM does.
const USES: usize = 4;

/// A share of all blocks, above 0 and at most 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Of 2^64 numbers, the greatest that is part of it.
    greatest: u64,
}

impl Share {
    /// `None` if it is not above 0 and at most 1.
    #[must_use]
    pub fn new(fraction: f64) -> Option<Self> {
        let numbers = fraction * 2.0_f64.powi(64);
        (fraction > 0.0 && fraction <= 1.0).then_some(Self { greatest: numbers as u64 })
    }

    /// Whether the `turn`th block is part of it: no random number, but as evenly spread as one.
    ///
    /// The finalizer of `SplitMix64` (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    /// OOPSLA 2014).
    fn holds(self, turn: u64) -> bool {
        let z = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) <= self.greatest
    }
}

/// The time of a block from when it was taken to its eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stay {
    /// All of it, in milliseconds.
    pub lifetime_ms: u64,
    /// Since its last use, or since it was taken if nobody ever found it.
    pub idle_ms: u64,
    /// Between its last uses, oldest first; of the last four uses, thus at most three.
    pub gaps_ms: Vec<u64>,
}

/// A block that is followed. A use is a prefix hit, or an equal block that gave way to it.
#[derive(Debug, Clone)]
struct Followed {
    taken_ms: u64,
    /// The last uses, each in the place of its number.
    uses_ms: [u64; USES],
    uses: usize,
}

impl Followed {
    fn over(&self, now_ms: u64) -> Stay {
        let kept = self.uses.saturating_sub(USES)..self.uses;
        let last: Vec<u64> = kept.map(|use_| self.uses_ms[use_ % USES]).collect();
        Stay {
            lifetime_ms: now_ms - self.taken_ms,
            idle_ms: now_ms - last.last().unwrap_or(&self.taken_ms),
            gaps_ms: last.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        }
    }
}

/// The sample, and the stays that are over.
#[derive(Debug)]
pub(crate) struct Residency {
    share: Share,
    now_ms: u64,
    /// Blocks taken so far.
    turn: u64,
    followed: Vec<Option<Box<Followed>>>,
    over: Vec<Stay>,
}

impl Residency {
    pub(crate) fn new(share: Share, blocks: u32) -> Self {
        let followed = vec![None; blocks as usize];
        Self { share, now_ms: 0, turn: 0, followed, over: Vec::new() }
    }

    /// Time never goes back.
    pub(crate) fn set_time(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    pub(crate) fn taken(&mut self, block: u32) {
        self.turn += 1;
        if self.share.holds(self.turn) {
            let taken_ms = self.now_ms;
            let followed = Followed { taken_ms, uses_ms: [0; USES], uses: 0 };
            self.followed[block as usize] = Some(Box::new(followed));
        }
    }

    #[inline]
    pub(crate) fn used(&mut self, block: u32) {
        if let Some(followed) = &mut self.followed[block as usize] {
            followed.uses_ms[followed.uses % USES] = self.now_ms;
            followed.uses += 1;
        }
    }

    pub(crate) fn evicted(&mut self, block: u32) {
        if let Some(followed) = self.followed[block as usize].take() {
            self.over.push(followed.over(self.now_ms));
        }
    }

    /// The block became vacant.
    pub(crate) fn forget(&mut self, block: u32) {
        self.followed[block as usize] = None;
    }

    pub(crate) fn has_stays(&self) -> bool {
        !self.over.is_empty()
    }

    pub(crate) fn take_stays(&mut self) -> Vec<Stay> {
        std::mem::take(&mut self.over)
    }

    /// Panics if a vacant block is followed.
    pub(crate) fn check(&self, vacant: impl Fn(u32) -> bool) {
        for (block, followed) in (0..).zip(&self.followed) {
            assert!(followed.is_none() || !vacant(block), "vacant block {block} is followed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_above_none_and_at_most_all() {
        assert_eq!([0.0, -0.1, 1.001, f64::NAN].map(Share::new), [None; 4]);
        let all = Share::new(1.0).unwrap();
        assert!((0..10_000).all(|turn| all.holds(turn)));
        for fraction in [0.5, 0.01, 0.001] {
            let share = Share::new(fraction).unwrap();
            let held = (1..=1_000_000).filter(|&turn| share.holds(turn)).count() as f64;
            let expected = 1e6 * fraction;
            let sigma = (expected * (1.0 - fraction)).sqrt();
            assert!((held - expected).abs() < 4.0 * sigma, "{held} of {expected}");
        }
        // Requests of a hundred blocks: no place in them is followed more than others by much.
        let share = Share::new(0.1).unwrap();
        let of_place = |place| (0..1_000).filter(|n: &u64| share.holds(100 * n + place)).count();
        assert!((0..100).map(of_place).all(|held| (50..=150).contains(&held)));
    }

    /// The first numbers of `SplitMix64` with seed 0.
    #[test]
    fn turns_are_spread_by_the_published_finalizer() {
        let numbers = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        for (turn, greatest) in (1..).zip(numbers) {
            assert!(Share { greatest }.holds(turn));
            assert!(!Share { greatest: greatest - 1 }.holds(turn), "{turn}");
        }
    }

    #[test]
    fn a_stay_has_its_length_its_end_and_the_gaps_of_its_last_uses() {
        let mut residency = Residency::new(Share::new(1.0).unwrap(), 2);
        residency.set_time(100);
        residency.taken(0);
        residency.taken(1);
        for now_ms in [110, 130, 170, 250, 410] {
            residency.set_time(now_ms);
            residency.used(0);
        }
        residency.set_time(400); // A clock that goes back stands still.
        residency.used(0);
        residency.set_time(1_000);
        residency.evicted(1);
        residency.evicted(0);
        residency.evicted(0); // Over already.
        let never_used = Stay { lifetime_ms: 900, idle_ms: 900, gaps_ms: Vec::new() };
        let used = Stay { lifetime_ms: 900, idle_ms: 590, gaps_ms: vec![80, 160, 0] };
        assert_eq!(residency.take_stays(), [never_used, used]);
        assert!(!residency.has_stays());
        residency.taken(0);
        residency.forget(0);
        residency.evicted(0);
        assert!(!residency.has_stays(), "one that became vacant was not evicted");
    }

    #[test]
    #[should_panic(expected = "vacant block 1 is followed")]
    fn a_vacant_block_that_is_followed_is_noticed() {
        let mut residency = Residency::new(Share::new(1.0).unwrap(), 2);
        residency.taken(1);
        residency.check(|_| true);
    }
}
