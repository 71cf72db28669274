//! Expected time of a step, and the number of prompt tokens that fit into a given time.

use crate::step_deadline::StepWorkload;

/// Costs of steps in nanoseconds. The expected time of a step is `fixed + per token · tokens + per pair · pairs`, see
/// [`StepWorkload`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCosts {
    /// Cost of every step.
    pub fixed_ns: f64,
    /// Cost of each token.
    pub token_ns: f64,
    /// Cost of each pair of a prompt token and a position of its context.
    pub pair_ns: f64,
}

impl StepCosts {
    /// Returns the expected time of a step in nanoseconds.
    pub fn expected_ns(&self, work: StepWorkload) -> f64 {
        self.fixed_ns
            + self.token_ns * work.tokens as f64
            + self.pair_ns * work.attention_pairs as f64
    }

    /// Returns the expected time in nanoseconds of a prefill chunk of `len` tokens from position `start` on, without the fixed
    /// cost of its step.
    pub(crate) fn chunk_ns(&self, start: u32, len: u32) -> f64 {
        let (start, len) = (f64::from(start), f64::from(len));
        len * (self.token_ns + self.pair_ns * (start + len))
    }

    /// Returns the length of the longest prefill chunk from position `start` on whose expected time is at most `left_ns`: the root
    /// of `pair · n² + (token + pair · start) · n = left`.
    pub(crate) fn chunk_within(&self, start: u32, left_ns: f64) -> u32 {
        if left_ns <= 0.0 {
            return 0;
        }
        let per_token = self.token_ns + self.pair_ns * f64::from(start);
        // The form of the root that does not lose precision, and exists, if the cost per pair is small or zero.
        let root = (per_token * per_token + 4.0 * self.pair_ns * left_ns).sqrt();
        // Saturates: without any cost, all tokens fit.
        (2.0 * left_ns / (per_token + root)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: StepCosts = StepCosts { fixed_ns: 2e6, token_ns: 10_000.0, pair_ns: 2.0 };

    #[test]
    fn longest_chunk_fits_and_one_token_more_does_not() {
        for start in [0, 100, 4_096, 65_536, 1 << 20] {
            for left_ns in [20_000.0, 1e6, 3e7, 5e9] {
                let len = COSTS.chunk_within(start, left_ns);
                assert!(COSTS.chunk_ns(start, len) <= left_ns, "{start} {left_ns}: {len}");
                assert!(COSTS.chunk_ns(start, len + 1) > left_ns, "{start} {left_ns}: {len}");
            }
        }
        assert_eq!(COSTS.chunk_within(7, 0.0), 0);
        assert_eq!(COSTS.chunk_within(7, -5.0), 0);
    }

    #[test]
    fn costs_of_zero_are_valid() {
        let linear = StepCosts { pair_ns: 0.0, ..COSTS };
        assert_eq!(linear.chunk_within(1 << 20, 1e6), 100);
        let free = StepCosts { fixed_ns: 0.0, token_ns: 0.0, pair_ns: 0.0 };
        assert_eq!(free.chunk_within(0, 1e6), u32::MAX);
        let work = StepWorkload { tokens: 3, attention_pairs: 50 };
        assert_eq!((free.expected_ns(work), COSTS.expected_ns(work)), (0.0, 2_030_100.0));
    }
}
