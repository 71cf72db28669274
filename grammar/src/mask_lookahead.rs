//! Decides whether the token bitmasks (masks) of a request are computed before the steps that need them.
//! The decision depends on the processor time of earlier masks.

use super::limits::{FAST_MASKS_TO_RECOVER, MASK_FAST, MASK_SLOW};
use std::time::Duration;

/// Decides whether a request's token bitmasks are precomputed, that is, computed before the steps that need
/// them.
pub(super) struct MaskLookahead {
    pub(super) precomputes: bool,
    /// Number of consecutive masks so far whose processor time was at most `MASK_FAST`.
    fast_in_a_row: u32,
    /// Number of consecutive fast masks after which precomputation ends. The number doubles each time a step
    /// proceeds without a mask.
    fast_needed: u32,
}

impl MaskLookahead {
    /// Creates the state for a request; `is_slow` is whether the grammar's masks are slow.
    pub(super) fn new(is_slow: bool) -> Self {
        Self { precomputes: is_slow, fast_in_a_row: 0, fast_needed: FAST_MASKS_TO_RECOVER }
    }

    /// Updates the decision after one mask. `proceeded_without`: whether a step proceeded without the mask;
    /// `cpu`: processor time of the mask.
    pub(super) fn record(&mut self, proceeded_without: bool, cpu: Duration) {
        if proceeded_without || cpu > MASK_SLOW {
            (self.precomputes, self.fast_in_a_row) = (true, 0);
            if proceeded_without {
                self.fast_needed = self.fast_needed.saturating_mul(2);
            }
        } else if cpu <= MASK_FAST {
            self.fast_in_a_row = self.fast_in_a_row.saturating_add(1);
            self.precomputes &= self.fast_in_a_row < self.fast_needed;
        } else {
            self.fast_in_a_row = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_precomputed_until_fast_again() {
        let mut pacing = MaskLookahead { precomputes: false, fast_in_a_row: 0, fast_needed: 2 };
        let fast = Duration::ZERO;
        pacing.record(false, fast);
        assert!(!pacing.precomputes);
        pacing.record(true, fast);
        assert!(pacing.precomputes && pacing.fast_needed == 4);
        for _ in 0..3 {
            pacing.record(false, fast);
            assert!(pacing.precomputes);
        }
        pacing.record(false, fast);
        assert!(!pacing.precomputes);
        pacing.record(false, MASK_SLOW * 2);
        assert!(pacing.precomputes && pacing.fast_needed == 4, "no step missed the mask");
    }
}
