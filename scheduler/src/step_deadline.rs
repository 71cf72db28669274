//! When a step counts as late: a multiple of what steps like it took so far.
//!
//! The expectation has three terms, `fixed + per token · tokens + per pair · pairs`: attention multiplies every token of a
//! prompt with all in front of it, and a prompt behind a long cached prefix has long contexts from its first step on. The
//! first two begin as fitted to the executor's first passes, whose contexts are short, though never at next to nothing; what a
//! pair costs is guessed. Every answer corrects them, upwards by a quarter of the difference, downwards by a 64th, each term by
//! the square of its part of the expectation, and one of less than a 16th not at all: what hardly counts in a step
//! learns nothing from it, however many of them there are. No answer counts as more than twice its expectation: a
//! pause of the machine says little about the steps to come, and a pause in a step of one token nothing about one of
//! thousands.

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
/// Least of what an answer may count above its expectation, which may be little at first, and least that a step costs at first.
const LEAST_NS: f64 = 1e6;
/// Tokens that cost at first as much as the fixed part, at most: what costs nothing would never learn.
const TOKENS_AS_FIXED: f64 = 512.0;
/// Context whose attention costs a token at first as much as all else. By their sizes it is 5,000 (0.6B) to 27,000 (8B) in
/// usual models. Guessed too cheap, the tokens of the first long prompt would answer for its contexts.
const CONTEXT_AS_TOKEN: f64 = 8_192.0;

/// Least part of an expectation that learns from an answer.
const COUNTS: f64 = 1.0 / 16.0;

/// What decides how long a step takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Tokens forwarded.
    pub tokens: u64,
    /// Tokens of prompts, each times the context at the end of its row.
    pub pairs: u64,
}

/// Judges how long steps may take.
#[derive(Debug, Clone, Copy)]
pub struct StepDeadline {
    /// Set by `--step-deadline`.
    fixed: Option<Duration>,
    /// Nanoseconds of a step, of each of its tokens, of each pair.
    costs: [f64; 3],
}

impl StepDeadline {
    /// A deadline for steps of this pace, or always the same one.
    pub fn new(fixed: Option<Duration>, pace: Pace) -> Self {
        let step_ns = (pace.fixed_ns as f64).max(LEAST_NS);
        let token_ns = (pace.per_token_ns as f64).max(step_ns / TOKENS_AS_FIXED);
        Self { fixed, costs: [step_ns, token_ns, token_ns / CONTEXT_AS_TOKEN] }
    }

    /// How long a step with so much to do may take.
    pub fn of(&self, work: Work) -> Duration {
        let limit = Duration::from_nanos((MARGIN * self.expected_ns(work)) as u64);
        self.fixed.unwrap_or_else(|| limit.max(FLOOR))
    }

    /// How long it is expected to take.
    pub fn expected(&self, work: Work) -> Duration {
        Duration::from_nanos(self.expected_ns(work) as u64)
    }

    /// A step took so long.
    pub fn note(&mut self, work: Work, took: Duration) {
        let terms = self.terms(work);
        let expected: f64 = terms.iter().sum();
        let difference = (took.as_nanos() as f64 - expected).min(expected.max(LEAST_NS));
        let by = difference * if difference > 0.0 { RISE } else { FALL };
        let counts = |term: &f64| *term >= COUNTS * expected;
        let squares: f64 = terms.iter().filter(|term| counts(term)).map(|term| term * term).sum();
        for (cost, term) in self.costs.iter_mut().zip(terms).filter(|(_, term)| counts(term)) {
            // `term` changes by its part of `by`, and the cost of one of its units in proportion.
            *cost += *cost * by * term / squares;
        }
    }

    fn terms(&self, work: Work) -> [f64; 3] {
        let [step, token, pair] = self.costs;
        [step, token * work.tokens as f64, pair * work.pairs as f64]
    }

    fn expected_ns(&self, work: Work) -> f64 {
        self.terms(work).iter().sum()
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

    fn tokens(tokens: u64) -> Work {
        Work { tokens, pairs: 0 }
    }

    /// A step of a prompt that ends at position `context`.
    fn prompt(tokens: u64, context: u64) -> Work {
        Work { tokens, pairs: tokens * context }
    }

    fn ms(deadline: &StepDeadline, count: u64) -> u64 {
        deadline.of(tokens(count)).as_millis() as u64
    }

    fn note(deadline: &mut StepDeadline, steps: u32, count: u64, took_ms: u64) {
        for _ in 0..steps {
            deadline.note(tokens(count), Duration::from_millis(took_ms));
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
        let once = ms(&deadline, 1);
        assert!((12_500..12_600).contains(&once), "of 2 s more, 1 s counts, and a quarter of that");
        note(&mut deadline, 40, 1, 3_000);
        assert!((29_900..=30_000).contains(&ms(&deadline, 1)), "{deadline:?}");
        note(&mut deadline, 1, 1, 1_000);
        assert!((29_600..=29_700).contains(&ms(&deadline, 1)), "{deadline:?}");
        note(&mut deadline, 600, 1, 1_000);
        assert!((10_000..=10_100).contains(&ms(&deadline, 1)), "{deadline:?}");
    }

    #[test]
    fn terms_of_equal_weight_share_a_difference() {
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

    /// What a model takes whose attention is dear: one layer of it and next to nothing else, on a CPU.
    fn took(work: Work) -> Duration {
        Duration::from_nanos(5_000_000 + 37_000 * work.tokens + 54 * work.pairs / 10)
    }

    #[test]
    fn a_prompt_behind_a_long_cached_prefix_is_no_hang() {
        let mut deadline = of(5, 37);
        let mut step = |work: Work| {
            let share = took(work).as_secs_f64() / deadline.of(work).as_secs_f64();
            assert!(share < 0.3, "{work:?} takes {:?} of {:?}", took(work), deadline.of(work));
            deadline.note(work, took(work));
        };
        let long = (1..=37).map(|chunk| prompt(8_192, chunk * 8_192));
        long.for_each(&mut step);
        for _ in 0..1_000 {
            step(prompt(600, 600));
            (0..4).for_each(|_| step(tokens(1)));
        }
        step(prompt(8_192, 38 * 8_192)); // 14 s, where the last 5,000 steps took 29 ms at most.
    }

    #[test]
    fn the_first_long_prompt_behind_many_short_ones_teaches_enough() {
        for token_us in [0, 37] {
            let mut deadline = of(5, token_us);
            let mut step = |work: Work| {
                let share = took(work).as_secs_f64() / deadline.of(work).as_secs_f64();
                assert!(share < 0.5, "{token_us}: {work:?} takes {share} of its deadline");
                deadline.note(work, took(work));
            };
            (0..700).for_each(|_| step(prompt(600, 600)));
            (1..=37).for_each(|chunk| step(prompt(8_192, chunk * 8_192)));
            (0..300).for_each(|_| step(prompt(600, 600)));
            step(prompt(8_192, 38 * 8_192));
        }
    }

    #[test]
    fn what_a_pair_costs_is_found_out_whatever_was_guessed() {
        for token_us in [0, 4, 37, 400] {
            let mut deadline = of(5, token_us);
            for _ in 0..20 {
                for chunk in 1..=37 {
                    let work = prompt(8_192, chunk * 8_192);
                    deadline.note(work, took(work));
                }
                (0..500).for_each(|_| deadline.note(tokens(1), took(tokens(1))));
            }
            for work in [prompt(8_192, 8_192), prompt(8_192, 300_000), tokens(1)] {
                let ratio = deadline.expected(work).as_secs_f64() / took(work).as_secs_f64();
                assert!((0.5..2.5).contains(&ratio), "{token_us}: {work:?} {ratio}");
            }
        }
    }

    #[test]
    fn many_short_steps_unlearn_nothing_of_long_ones() {
        let (mut deadline, long) = (of(5, 37), prompt(8_192, 300_000));
        for chunk in 1..=37 {
            let work = prompt(8_192, chunk * 8_192);
            deadline.note(work, took(work));
        }
        // Rows of one token whose contexts are read have no pairs: each of these steps takes longer or shorter than the last.
        for _ in 0..100_000 {
            for (work, contexts) in
                [(tokens(256), 256 * 8_192), (prompt(300, 300), 0), (tokens(16), 32_768)]
            {
                deadline.note(work, took(work) + Duration::from_nanos(5 * contexts));
            }
        }
        let ratio = deadline.expected(long).as_secs_f64() / took(long).as_secs_f64();
        assert!(ratio > 0.8, "{ratio}");
    }
}
