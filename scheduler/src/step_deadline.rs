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

use protocol::StepCost;
use std::time::Duration;

/// No step is late before this: machines pause.
const DEADLINE_MIN: Duration = Duration::from_secs(5);
/// How much longer than expected a step may take. Contexts grow, and with them a step's time, before an answer
/// has told.
const DEADLINE_FACTOR: f64 = 10.0;
/// Parts of a difference by which the expectation follows.
const RISE_RATE: f64 = 1.0 / 4.0;
const FALL_RATE: f64 = 1.0 / 64.0;
/// Least of what an answer may count above its expectation, which may be little at first, and least that a step costs at first.
const STEP_COST_MIN_NS: f64 = 1e6;
/// Tokens that cost at first as much as the fixed part, at most: what costs nothing would never learn.
const TOKENS_PER_FIXED_COST_MAX: f64 = 512.0;
/// Context whose attention costs a token at first as much as all else. By their sizes it is 5,000 (0.6B) to 27,000 (8B) in
/// usual models. Guessed too cheap, the tokens of the first long prompt would answer for its contexts.
const CONTEXT_PER_TOKEN_COST: f64 = 8_192.0;

/// Least part of an expectation that learns from an answer.
const LEARNING_SHARE_MIN: f64 = 1.0 / 16.0;

/// What decides how long a step takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Tokens forwarded.
    pub tokens: u64,
    /// Tokens of prompts, each times the context at the end of its row.
    pub attention_pairs: u64,
}

/// Judges how long steps may take.
#[derive(Debug, Clone, Copy)]
pub struct StepDeadline {
    /// Set by `--step-deadline`.
    fixed_deadline: Option<Duration>,
    /// Nanoseconds of a step, of each of its tokens, of each pair.
    costs_ns: [f64; 3],
}

impl StepDeadline {
    /// A deadline for steps of this pace, or always the same one.
    pub fn new(fixed: Option<Duration>, pace: StepCost) -> Self {
        let step_ns = (pace.fixed_ns as f64).max(STEP_COST_MIN_NS);
        let token_ns = (pace.per_token_ns as f64).max(step_ns / TOKENS_PER_FIXED_COST_MAX);
        Self {
            fixed_deadline: fixed,
            costs_ns: [step_ns, token_ns, token_ns / CONTEXT_PER_TOKEN_COST],
        }
    }

    /// How long a step with so much to do may take.
    pub fn limit(&self, work: StepWork) -> Duration {
        let limit = Duration::from_nanos((DEADLINE_FACTOR * self.expected_ns(work)) as u64);
        self.fixed_deadline.unwrap_or_else(|| limit.max(DEADLINE_MIN))
    }

    /// How long it is expected to take.
    pub fn expected(&self, work: StepWork) -> Duration {
        Duration::from_nanos(self.expected_ns(work) as u64)
    }

    /// A step took so long.
    pub fn observe(&mut self, work: StepWork, took: Duration) {
        let terms = self.cost_terms(work);
        let expected: f64 = terms.iter().sum();
        let difference = (took.as_nanos() as f64 - expected).min(expected.max(STEP_COST_MIN_NS));
        let by = difference * if difference > 0.0 { RISE_RATE } else { FALL_RATE };
        let counts = |term: &f64| *term >= LEARNING_SHARE_MIN * expected;
        let squares: f64 = terms.iter().filter(|term| counts(term)).map(|term| term * term).sum();
        for (cost, term) in self.costs_ns.iter_mut().zip(terms).filter(|(_, term)| counts(term)) {
            // `term` changes by its part of `by`, and the cost of one of its units in proportion.
            *cost += *cost * by * term / squares;
        }
    }

    fn cost_terms(&self, work: StepWork) -> [f64; 3] {
        let [step, token, pair] = self.costs_ns;
        [step, token * work.tokens as f64, pair * work.attention_pairs as f64]
    }

    fn expected_ns(&self, work: StepWork) -> f64 {
        self.cost_terms(work).iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn deadline_for(fixed_ms: u64, token_us: u64) -> StepDeadline {
        let pace = StepCost { fixed_ns: fixed_ms * MS, per_token_ns: token_us * 1_000 };
        StepDeadline::new(None, pace)
    }

    fn tokens(tokens: u64) -> StepWork {
        StepWork { tokens, attention_pairs: 0 }
    }

    /// A step of a prompt that ends at position `context`.
    fn prompt(tokens: u64, context: u64) -> StepWork {
        StepWork { tokens, attention_pairs: tokens * context }
    }

    fn ms(deadline: &StepDeadline, count: u64) -> u64 {
        deadline.limit(tokens(count)).as_millis() as u64
    }

    fn observe_steps(deadline: &mut StepDeadline, steps: u32, count: u64, took_ms: u64) {
        for _ in 0..steps {
            deadline.observe(tokens(count), Duration::from_millis(took_ms));
        }
    }

    #[test]
    fn deadline_is_ten_times_expected_and_at_least_5_s() {
        let cpu = deadline_for(1_000, 10_000);
        assert_eq!((ms(&cpu, 1), ms(&cpu, 512)), (10_100, 61_200));
        let gpu = deadline_for(2, 10);
        assert_eq!((ms(&gpu, 1), ms(&gpu, 8_192)), (5_000, 5_000), "0.02 s and 0.84 s");
        let fixed = StepDeadline::new(Some(Duration::from_millis(70)), StepCost::default());
        assert_eq!(ms(&fixed, 8_192), 70);
    }

    #[test]
    fn deadline_rises_quickly_and_falls_slowly() {
        let mut deadline = deadline_for(1_000, 0);
        observe_steps(&mut deadline, 1, 1, 3_000);
        let once = ms(&deadline, 1);
        assert!((12_500..12_600).contains(&once), "of 2 s more, 1 s counts, and a quarter of that");
        observe_steps(&mut deadline, 40, 1, 3_000);
        assert!((29_900..=30_000).contains(&ms(&deadline, 1)), "{deadline:?}");
        observe_steps(&mut deadline, 1, 1, 1_000);
        assert!((29_600..=29_700).contains(&ms(&deadline, 1)), "{deadline:?}");
        observe_steps(&mut deadline, 600, 1, 1_000);
        assert!((10_000..=10_100).contains(&ms(&deadline, 1)), "{deadline:?}");
    }

    #[test]
    fn cost_terms_of_equal_weight_share_a_difference() {
        let mut deadline = deadline_for(1_000, 10_000); // 100 tokens: 1 s and 1 s.
        observe_steps(&mut deadline, 60, 100, 4_000);
        assert!((39_900..=40_000).contains(&ms(&deadline, 100)), "{deadline:?}");
        let one = ms(&deadline, 1); // Its own part of the excess, and of the tokens' a hundredth.
        assert!((15_000..=25_000).contains(&one), "{one}");
    }

    #[test]
    fn pause_in_a_small_step_does_not_raise_large_deadlines() {
        let mut gpu = deadline_for(2, 10);
        observe_steps(&mut gpu, 3, 1, 4_000);
        assert_eq!(ms(&gpu, 8_192), 5_000, "a time per token would make it days");
    }

    #[test]
    fn deadline_without_step_cost_starts_at_minimum_and_learns() {
        let mut deadline = StepDeadline::new(None, StepCost::default());
        assert_eq!(ms(&deadline, 8_192), 5_000);
        observe_steps(&mut deadline, 200, 512, 2_000);
        assert!((19_000..=20_000).contains(&ms(&deadline, 512)), "{deadline:?}");
    }

    /// What a model takes whose attention is dear: one layer of it and next to nothing else, on a CPU.
    fn step_time(work: StepWork) -> Duration {
        Duration::from_nanos(5_000_000 + 37_000 * work.tokens + 54 * work.attention_pairs / 10)
    }

    #[test]
    fn prompt_with_long_cached_prefix_is_no_timeout() {
        let mut deadline = deadline_for(5, 37);
        let mut step = |work: StepWork| {
            let share = step_time(work).as_secs_f64() / deadline.limit(work).as_secs_f64();
            assert!(
                share < 0.3,
                "{work:?} takes {:?} of {:?}",
                step_time(work),
                deadline.limit(work)
            );
            deadline.observe(work, step_time(work));
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
    fn first_long_prompt_after_short_ones_stays_in_deadline() {
        for token_us in [0, 37] {
            let mut deadline = deadline_for(5, token_us);
            let mut step = |work: StepWork| {
                let share = step_time(work).as_secs_f64() / deadline.limit(work).as_secs_f64();
                assert!(share < 0.5, "{token_us}: {work:?} takes {share} of its deadline");
                deadline.observe(work, step_time(work));
            };
            (0..700).for_each(|_| step(prompt(600, 600)));
            (1..=37).for_each(|chunk| step(prompt(8_192, chunk * 8_192)));
            (0..300).for_each(|_| step(prompt(600, 600)));
            step(prompt(8_192, 38 * 8_192));
        }
    }

    #[test]
    fn attention_pair_cost_converges_from_any_start() {
        for token_us in [0, 4, 37, 400] {
            let mut deadline = deadline_for(5, token_us);
            for _ in 0..20 {
                for chunk in 1..=37 {
                    let work = prompt(8_192, chunk * 8_192);
                    deadline.observe(work, step_time(work));
                }
                (0..500).for_each(|_| deadline.observe(tokens(1), step_time(tokens(1))));
            }
            for work in [prompt(8_192, 8_192), prompt(8_192, 300_000), tokens(1)] {
                let ratio = deadline.expected(work).as_secs_f64() / step_time(work).as_secs_f64();
                assert!((0.5..2.5).contains(&ratio), "{token_us}: {work:?} {ratio}");
            }
        }
    }

    #[test]
    fn short_steps_do_not_lower_long_step_deadlines() {
        let (mut deadline, long) = (deadline_for(5, 37), prompt(8_192, 300_000));
        for chunk in 1..=37 {
            let work = prompt(8_192, chunk * 8_192);
            deadline.observe(work, step_time(work));
        }
        // Rows of one token whose contexts are read have no pairs: each of these steps takes longer or shorter than the last.
        for _ in 0..100_000 {
            for (work, contexts) in
                [(tokens(256), 256 * 8_192), (prompt(300, 300), 0), (tokens(16), 32_768)]
            {
                deadline.observe(work, step_time(work) + Duration::from_nanos(5 * contexts));
            }
        }
        let ratio = deadline.expected(long).as_secs_f64() / step_time(long).as_secs_f64();
        assert!(ratio > 0.8, "{ratio}");
    }
}
