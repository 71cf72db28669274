//! Step deadline: a multiple of the expected step time, which is estimated from earlier steps.
//!
//! The expected time has three terms, `fixed + per token · tokens + per pair · pairs`. A pair is a prompt
//! token and one position of its context: the cost of attention is proportional to the number of pairs, and a
//! prompt with a long cached prefix has long contexts from its first step on. The fixed cost and the cost per
//! token start with values fitted to the executor's first passes, which have short contexts, with a lower
//! bound; the cost per pair starts as an estimate.
//!
//! The step time of every finished step corrects the costs: upwards by 1/4 of the difference between step
//! time and expected time, downwards by 1/64. Each term is corrected in proportion to the square of its share
//! of the expected time. A term with a share below 1/16 is not corrected, because the step time contains
//! little information about it. A step time above twice the expected time is clipped to that value, because a
//! pause of the machine contains little information about later steps.

use crate::StepCosts;
use protocol::StepCost;
use std::time::Duration;

/// Minimum deadline. It covers pauses of the machine.
const DEADLINE_MIN: Duration = Duration::from_secs(5);
/// Ratio of deadline to expected time. The margin covers growing contexts: step times grow with them, and the
/// expected time follows only after longer step times have been observed.
const DEADLINE_FACTOR: f64 = 10.0;
/// Share of (step time − expected time) that is added to the expected time if a step took longer than
/// expected.
const RISE_RATE: f64 = 1.0 / 4.0;
/// Share of (expected time − step time) that is subtracted from the expected time if a step took less time
/// than expected.
const FALL_RATE: f64 = 1.0 / 64.0;
/// Minimum initial fixed cost of a step. The excess of a step time over the expected time is clipped to
/// max(expected time, this value), because the expected time may be too small at first.
const STEP_COST_MIN_NS: f64 = 1e6;
/// Maximum initial ratio of the fixed cost to the cost per token. It keeps the cost per token above zero,
/// because a cost of zero would never be corrected.
const TOKENS_PER_FIXED_COST_MAX: f64 = 512.0;
/// Context length at which the initial cost of attention per token equals the cost of all other work per
/// token. Computed from layer sizes, this length is 5,000 (0.6B model) to 27,000 (8B model). With a lower
/// estimate of the pair cost, the time of the first long prompt would be attributed to the token cost.
const CONTEXT_PER_TOKEN_COST: f64 = 8_192.0;

/// Minimum share of the expected time that a term must have to be corrected.
const LEARNING_SHARE_MIN: f64 = 1.0 / 16.0;

/// Amount of work in a step, from which its expected time is computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepWorkload {
    /// Number of tokens forwarded.
    pub tokens: u64,
    /// Sum, over the prompt tokens of the step, of the context length at the end of the token's row.
    pub attention_pairs: u64,
}

/// Expected time and deadline of steps, for one executor.
#[derive(Debug, Clone, Copy)]
pub struct StepDeadlineEstimator {
    /// Fixed deadline of every step (`--step-deadline`), if configured.
    fixed_deadline: Option<Duration>,
    /// Costs in nanoseconds: per step, per token, and per pair of a prompt token and a context position.
    costs_ns: [f64; 3],
}

impl StepDeadlineEstimator {
    /// Creates the estimator for an executor with the measured cost `step_cost`. If `fixed` is given, every
    /// step has this deadline.
    pub fn new(fixed: Option<Duration>, step_cost: StepCost) -> Self {
        let step_ns = (step_cost.fixed_ns as f64).max(STEP_COST_MIN_NS);
        let token_ns = (step_cost.per_token_ns as f64).max(step_ns / TOKENS_PER_FIXED_COST_MAX);
        Self {
            fixed_deadline: fixed,
            costs_ns: [step_ns, token_ns, token_ns / CONTEXT_PER_TOKEN_COST],
        }
    }

    /// Returns the deadline of a step.
    pub fn limit(&self, work: StepWorkload) -> Duration {
        let limit = Duration::from_nanos((DEADLINE_FACTOR * self.expected_ns(work)) as u64);
        self.fixed_deadline.unwrap_or_else(|| limit.max(DEADLINE_MIN))
    }

    /// Returns the estimated costs of steps. They rise faster than they fall, so most steps take less time than they predict.
    pub fn costs(&self) -> StepCosts {
        let [fixed_ns, token_ns, pair_ns] = self.costs_ns;
        StepCosts { fixed_ns, token_ns, pair_ns }
    }

    /// Returns the expected time of a step.
    pub fn expected(&self, work: StepWorkload) -> Duration {
        Duration::from_nanos(self.expected_ns(work) as u64)
    }

    /// Corrects the costs, from which expected times are computed, by the observed time of a step.
    pub fn observe(&mut self, work: StepWorkload, step_time: Duration) {
        let terms = self.cost_terms(work);
        let expected: f64 = terms.iter().sum();
        let difference =
            (step_time.as_nanos() as f64 - expected).min(expected.max(STEP_COST_MIN_NS));
        let correction = difference * if difference > 0.0 { RISE_RATE } else { FALL_RATE };
        let is_corrected = |term: &f64| *term >= LEARNING_SHARE_MIN * expected;
        let squares: f64 =
            terms.iter().filter(|term| is_corrected(term)).map(|term| term * term).sum();
        for (cost, term) in
            self.costs_ns.iter_mut().zip(terms).filter(|(_, term)| is_corrected(term))
        {
            // Each corrected term changes by `correction * term² / squares`, and its cost per unit in
            // proportion.
            *cost += *cost * correction * term / squares;
        }
    }

    fn cost_terms(&self, work: StepWorkload) -> [f64; 3] {
        let [step, token, pair] = self.costs_ns;
        [step, token * work.tokens as f64, pair * work.attention_pairs as f64]
    }

    fn expected_ns(&self, work: StepWorkload) -> f64 {
        self.costs().expected_ns(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn deadline_for(fixed_ms: u64, token_us: u64) -> StepDeadlineEstimator {
        let step_cost = StepCost { fixed_ns: fixed_ms * MS, per_token_ns: token_us * 1_000 };
        StepDeadlineEstimator::new(None, step_cost)
    }

    fn tokens(tokens: u64) -> StepWorkload {
        StepWorkload { tokens, attention_pairs: 0 }
    }

    /// Returns the work of a step with one prompt chunk that ends at position `context`.
    fn prompt(tokens: u64, context: u64) -> StepWorkload {
        StepWorkload { tokens, attention_pairs: tokens * context }
    }

    fn ms(deadline: &StepDeadlineEstimator, count: u64) -> u64 {
        deadline.limit(tokens(count)).as_millis() as u64
    }

    fn observe_steps(
        deadline: &mut StepDeadlineEstimator,
        steps: u32,
        count: u64,
        step_time_ms: u64,
    ) {
        for _ in 0..steps {
            deadline.observe(tokens(count), Duration::from_millis(step_time_ms));
        }
    }

    #[test]
    fn deadline_is_ten_times_expected_and_at_least_5_s() {
        let cpu = deadline_for(1_000, 10_000);
        assert_eq!((ms(&cpu, 1), ms(&cpu, 512)), (10_100, 61_200));
        let gpu = deadline_for(2, 10);
        assert_eq!((ms(&gpu, 1), ms(&gpu, 8_192)), (5_000, 5_000), "0.02 s and 0.84 s");
        let fixed =
            StepDeadlineEstimator::new(Some(Duration::from_millis(70)), StepCost::default());
        assert_eq!(ms(&fixed, 8_192), 70);
    }

    #[test]
    fn deadline_rises_quickly_and_falls_slowly() {
        let mut deadline = deadline_for(1_000, 0);
        observe_steps(&mut deadline, 1, 1, 3_000);
        let once = ms(&deadline, 1);
        assert!(
            (12_500..12_600).contains(&once),
            "of an excess of 2 s, 1 s counts, and a quarter of it is added"
        );
        observe_steps(&mut deadline, 40, 1, 3_000);
        assert!((29_900..=30_000).contains(&ms(&deadline, 1)), "{deadline:?}");
        observe_steps(&mut deadline, 1, 1, 1_000);
        assert!((29_600..=29_700).contains(&ms(&deadline, 1)), "{deadline:?}");
        observe_steps(&mut deadline, 600, 1, 1_000);
        assert!((10_000..=10_100).contains(&ms(&deadline, 1)), "{deadline:?}");
    }

    #[test]
    fn cost_terms_of_equal_weight_share_a_difference() {
        let mut deadline = deadline_for(1_000, 10_000); // 100 tokens: 1 s fixed and 1 s for tokens.
        observe_steps(&mut deadline, 60, 100, 4_000);
        assert!((39_900..=40_000).contains(&ms(&deadline, 100)), "{deadline:?}");
        let one = ms(&deadline, 1); // The fixed cost after its correction, and a hundredth of the token term.
        assert!((15_000..=25_000).contains(&one), "{one}");
    }

    #[test]
    fn pause_in_a_small_step_does_not_raise_large_deadlines() {
        let mut gpu = deadline_for(2, 10);
        observe_steps(&mut gpu, 3, 1, 4_000);
        assert_eq!(ms(&gpu, 8_192), 5_000, "the time of a pause is not attributed to tokens");
    }

    #[test]
    fn deadline_without_step_cost_starts_at_minimum_and_learns() {
        let mut deadline = StepDeadlineEstimator::new(None, StepCost::default());
        assert_eq!(ms(&deadline, 8_192), 5_000);
        observe_steps(&mut deadline, 200, 512, 2_000);
        assert!((19_000..=20_000).contains(&ms(&deadline, 512)), "{deadline:?}");
    }

    /// Returns the step time of a model dominated by attention: one attention layer and little else, on a
    /// CPU.
    fn step_time(work: StepWorkload) -> Duration {
        Duration::from_nanos(5_000_000 + 37_000 * work.tokens + 54 * work.attention_pairs / 10)
    }

    #[test]
    fn prompt_with_long_cached_prefix_is_no_timeout() {
        let mut deadline = deadline_for(5, 37);
        let mut step = |work: StepWorkload| {
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
        step(prompt(8_192, 38 * 8_192)); // 14 s, while the last 5,000 steps took at most 29 ms.
    }

    #[test]
    fn first_long_prompt_after_short_ones_stays_in_deadline() {
        for token_us in [0, 37] {
            let mut deadline = deadline_for(5, token_us);
            let mut step = |work: StepWorkload| {
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
        // Decode rows count no pairs although their attention also reads contexts, so the actual step times
        // are above or below the expected times.
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
