//! When a step counts as late: a multiple of what steps like it took so far.
//!
//! The expectation is a line, `fixed + per token · tokens`, fitted to the executor's first passes and corrected by
//! every answer: upwards by a quarter of the difference, downwards by a 64th. No answer counts as more than
//! twice its expectation: a pause of the machine says little about the steps to come, and a pause in a step
//! of one token nothing about one of thousands.

use protocol::Pace;
use std::time::Duration;

/// No step is late before this: machines pause.
const FLOOR: Duration = Duration::from_secs(5);
/// How much longer than expected a step may take. Contexts grow, and with them a step's time, before an answer
/// has told.
const MARGIN: f64 = 10.0;
/// Parts of a difference by which the expectation follows.
const RISE: f64 = 1.0 / 4.0;
const FALL: f64 = 1.0 / 64.0;
/// Least of what an answer may count above its expectation, which may be nothing at first.
const EXCESS_NS: f64 = 1e6;

/// Judges how long steps may take.
#[derive(Debug, Clone, Copy)]
pub struct StepDeadline {
    /// Set by `--step-deadline`.
    fixed: Option<Duration>,
    step_ns: f64,
    token_ns: f64,
}

impl StepDeadline {
    /// A deadline for steps of this pace, or always the same one.
    pub fn new(fixed: Option<Duration>, pace: Pace) -> Self {
        Self { fixed, step_ns: pace.fixed_ns as f64, token_ns: pace.per_token_ns as f64 }
    }

    /// How long a step of so many tokens may take.
    pub fn of(&self, tokens: u64) -> Duration {
        let limit = Duration::from_nanos((MARGIN * self.expected_ns(tokens)) as u64);
        self.fixed.unwrap_or_else(|| limit.max(FLOOR))
    }

    /// How long a step of so many tokens is expected to take.
    pub fn expected(&self, tokens: u64) -> Duration {
        Duration::from_nanos(self.expected_ns(tokens) as u64)
    }

    /// A step of so many tokens took so long.
    pub fn note(&mut self, tokens: u64, took: Duration) {
        let expected = self.expected_ns(tokens);
        let difference = (took.as_nanos() as f64 - expected).min(expected.max(EXCESS_NS));
        let by = difference * if difference > 0.0 { RISE } else { FALL };
        // Each term answers for its part of the expectation.
        let of_tokens = self.token_ns * tokens as f64 / expected.max(1.0);
        self.step_ns += by * (1.0 - of_tokens);
        self.token_ns += by * of_tokens / tokens.max(1) as f64;
    }

    fn expected_ns(&self, tokens: u64) -> f64 {
        self.step_ns + self.token_ns * tokens as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn of(fixed_ms: u64, token_us: u64) -> StepDeadline {
        let pace = Pace { fixed_ns: fixed_ms * MS, per_token_ns: token_us * 1_000 };
        StepDeadline::new(None, pace)
    }

    fn ms(deadline: &StepDeadline, tokens: u64) -> u64 {
        deadline.of(tokens).as_millis() as u64
    }

    fn note(deadline: &mut StepDeadline, steps: u32, tokens: u64, took_ms: u64) {
        for _ in 0..steps {
            deadline.note(tokens, Duration::from_millis(took_ms));
        }
    }

    #[test]
    fn ten_times_the_line_but_never_below_five_seconds() {
        let cpu = of(1_000, 10_000);
        assert_eq!((ms(&cpu, 1), ms(&cpu, 512)), (10_100, 61_200));
        let gpu = of(2, 10);
        assert_eq!((ms(&gpu, 1), ms(&gpu, 8_192)), (5_000, 5_000), "0.02 s and 0.84 s");
        let fixed = StepDeadline::new(Some(Duration::from_millis(70)), Pace::default());
        assert_eq!(ms(&fixed, 8_192), 70);
    }

    #[test]
    fn it_follows_slower_steps_quickly_and_faster_ones_slowly() {
        let mut deadline = of(1_000, 0);
        note(&mut deadline, 1, 1, 3_000);
        assert_eq!(ms(&deadline, 1), 12_500, "of 2 s more, 1 s counts, and a quarter of that");
        note(&mut deadline, 40, 1, 3_000);
        assert!((29_900..=30_000).contains(&ms(&deadline, 1)), "{deadline:?}");
        note(&mut deadline, 1, 1, 1_000);
        assert!((29_600..=29_700).contains(&ms(&deadline, 1)), "{deadline:?}");
        note(&mut deadline, 600, 1, 1_000);
        assert!((10_000..=10_100).contains(&ms(&deadline, 1)), "{deadline:?}");
    }

    #[test]
    fn both_terms_follow_in_proportion() {
        let mut deadline = of(1_000, 10_000); // 100 tokens: 1 s and 1 s.
        note(&mut deadline, 60, 100, 4_000);
        assert!((39_900..=40_000).contains(&ms(&deadline, 100)), "{deadline:?}");
        let one = ms(&deadline, 1); // Its own part of the excess, and of the tokens' a hundredth.
        assert!((15_000..=25_000).contains(&one), "{one}");
    }

    #[test]
    fn a_pause_in_a_small_step_is_no_licence_for_a_large_one() {
        let mut gpu = of(2, 10);
        note(&mut gpu, 3, 1, 4_000);
        assert_eq!(ms(&gpu, 8_192), 5_000, "a time per token would make it days");
    }

    #[test]
    fn an_executor_that_measured_nothing_gets_the_floor_and_learns() {
        let mut deadline = StepDeadline::new(None, Pace::default());
        assert_eq!(ms(&deadline, 8_192), 5_000);
        note(&mut deadline, 200, 512, 2_000);
        assert!((19_000..=20_000).contains(&ms(&deadline, 512)), "{deadline:?}");
    }
}
