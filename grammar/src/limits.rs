//! What a grammar may cost. A hostile one costs its own request and nothing else.

use llguidance::api::ParserLimits;
use std::time::Duration;

/// Longest text of a grammar, in bytes.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Brackets within brackets: what is parsed by recursion is bounded before.
pub const NESTING_MAX: usize = 128;
/// Texts of a choice that are words of their own.
pub(super) const SEPARATE_CHOICES_MAX: usize = 100;
/// Time a grammar may take to compile: whoever sends a hostile one hears of it within a second.
pub(super) const COMPILE_TIME: Duration = Duration::from_millis(900);
/// Time it may wait for its turn.
pub(super) const QUEUE_TIME: Duration = Duration::from_secs(10);
/// Grammars that may wait.
pub(super) const WAITING_MAX: usize = 1_024;
/// Grammars compiled at a time: lanes, each with a process of its own for trials.
pub(super) const COMPILE_THREADS: usize = 2;
/// Time that such a process may take to start and to learn the vocabulary.
pub(super) const WORKER_START_TIME: Duration = Duration::from_mins(1);
/// Processor time that a grammar is waited for, also where others leave so little that it takes longer than `COMPILE_TIME`: with less it is not at fault.
pub(super) const DRY_RUN_CPU_TIME_MIN: Duration = Duration::from_millis(50);
/// Time after which it is given up in any case.
pub(super) const DRY_RUN_TIME_MAX: Duration = Duration::from_secs(3);
/// Address space that it may take beyond what it starts with.
pub(super) const WORKER_BYTES: u64 = 1 << 30;
/// Stack of the thread that tries a grammar. Parsers recurse; only what is touched is ever allocated.
pub(super) const DRY_RUN_STACK_BYTES: usize = 128 << 20;
/// Stack of a thread that compiles what has passed its trial: more, so that no grammar overflows here first.
pub(super) const COMPILE_STACK_BYTES: usize = 256 << 20;
/// Stack of a thread that makes masks.
pub(super) const MASK_STACK_BYTES: usize = 64 << 20;
/// Least and most time that a step waits for masks beyond what it is expected to take.
const MASK_GRACE_PERIOD: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(5)];
/// Processor time of a mask that is not made while a step waits, if it can be foreseen: once a grammar had one, its
/// requests begin with masks that are made ahead.
pub(super) const MASK_SLOW: Duration = Duration::from_millis(2);
/// The same, if its grammar's trial has met such a mask: all masks are then taken for slow from the first one on.
pub(super) const MASK_SLOW_IN_DRY_RUN: Duration = Duration::from_millis(5);
/// Processor time of a quick mask.
pub(super) const MASK_FAST: Duration = Duration::from_millis(1);
/// Quick masks in a row after which the next ones are taken for quick too.
pub(super) const FAST_MASKS_TO_RECOVER: u32 = 16;
/// Time after which a mask is given up.
pub(super) const MASK_TIME: Duration = Duration::from_secs(3);
/// Processor time that a request may spend on its masks, and more of it with each token of its output.
pub(super) const MASK_BUDGET: Duration = Duration::from_secs(10);
pub(super) const MASK_BUDGET_PER_TOKEN: Duration = Duration::from_millis(20);
/// Memory of a compiled grammar.
pub(super) const COMPILED_BYTES_MAX: usize = 16 << 20;
/// Copies that running requests follow: each has one of its own as long as they fit.
pub(super) const MATCHER_COPIES_BYTES: usize = 1 << 30;
/// Compiled grammars that are kept.
pub(super) const CACHE_BYTES: usize = 64 << 20;
/// Tokens longer than this are never allowed: the trie has room for no longer ones.
pub(super) const TOKEN_BYTES_MAX: usize = 512;

/// Time that a step which is expected to take so long waits for masks beyond that: its other rows wait with it.
pub(super) fn mask_grace_period(expected: Duration) -> Duration {
    let [least, most] = MASK_GRACE_PERIOD;
    (expected / 20).clamp(least, most)
}

/// What llguidance may spend on a grammar, and on one token of one request.
pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 500_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mask_grace_period_is_a_twentieth_of_the_step() {
        let of_us = |us| mask_grace_period(Duration::from_micros(us)).as_micros();
        assert_eq!([0, 5_000, 20_000, 9_000_000].map(of_us), [100, 250, 1_000, 5_000]);
    }
}
