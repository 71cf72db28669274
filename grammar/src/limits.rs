//! Resource limits of grammars, which ensure that a hostile grammar harms only its own request.

use llguidance::api::ParserLimits;
use std::time::Duration;

/// Maximum length of a grammar text in bytes.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Maximum nesting depth of brackets in a grammar, checked before a recursive parser reads the grammar.
pub const NESTING_MAX: usize = 128;
/// Maximum number of texts in a choice constraint for which each text is a separate lexeme.
pub(super) const SEPARATE_CHOICES_MAX: usize = 100;
/// Time limit of a dry run (test compilation of a grammar in a worker process). It is short, so that the
/// client that sent a hostile grammar gets its error within a second.
pub(super) const COMPILE_TIME: Duration = Duration::from_millis(900);
/// Maximum time that a constraint may wait in the compile queue.
pub(super) const QUEUE_TIME: Duration = Duration::from_secs(10);
/// Maximum number of constraints in the compile queue.
pub(super) const WAITING_MAX: usize = 1_024;
/// Number of compile threads. Each thread has a worker process for dry runs (test compilations of
/// grammars).
pub(super) const COMPILE_THREADS: usize = 2;
/// Time limit for a worker process to start and load the vocabulary.
pub(super) const WORKER_START_TIME: Duration = Duration::from_mins(1);
/// Processor time that each dry run (test compilation) gets, even if this takes longer than `COMPILE_TIME`
/// on an overloaded machine. If a dry run times out with less processor time, the machine counts as the
/// cause, not the grammar.
pub(super) const DRY_RUN_CPU_TIME_MIN: Duration = Duration::from_millis(50);
/// Wall-clock time after which every dry run (test compilation of a grammar) is aborted.
pub(super) const DRY_RUN_TIME_MAX: Duration = Duration::from_secs(3);
/// Maximum growth of a worker process's address space after its start, in bytes.
pub(super) const WORKER_BYTES: u64 = 1 << 30;
/// Stack size of the dry-run thread in bytes. It is large because parsers recurse; the system allocates only
/// the pages that are used.
pub(super) const DRY_RUN_STACK_BYTES: usize = 128 << 20;
/// Stack size in bytes of a thread that compiles after the dry run. It is larger than that of the dry-run
/// thread, so that a grammar that overflows a stack does so in the dry run.
pub(super) const COMPILE_STACK_BYTES: usize = 256 << 20;
/// Stack size in bytes of a thread that computes masks.
pub(super) const MASK_STACK_BYTES: usize = 64 << 20;
/// Minimum and maximum grace period: time for which an engine step waits for token bitmasks (masks) after
/// the expected duration of its forward pass.
const MASK_GRACE_PERIOD: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(5)];
/// Minimum and maximum grace period of a step in which rows with a token bitmask have draft tokens. It is
/// longer because the executor must first report the draft tokens, and because draft tokens without
/// bitmasks are discarded.
const DRAFT_MASK_GRACE_PERIOD: [Duration; 2] =
    [Duration::from_millis(2), Duration::from_millis(10)];
/// Processor time above which a mask (token bitmask) counts as slow. After a slow mask, the masks of all
/// requests with this grammar are precomputed, so that no step waits for them.
pub(super) const MASK_SLOW: Duration = Duration::from_millis(2);
/// Processor time of a token bitmask in the dry run (test compilation) above which the grammar's bitmasks
/// count as slow from the start.
pub(super) const MASK_SLOW_IN_DRY_RUN: Duration = Duration::from_millis(5);
/// Maximum processor time of a mask (token bitmask) that counts as fast. Masks between `MASK_FAST` and
/// `MASK_SLOW` count neither as fast nor as slow.
pub(super) const MASK_FAST: Duration = Duration::from_millis(1);
/// Number of consecutive fast masks (`MASK_FAST`) after which the masks of a request are no longer
/// precomputed, that is, computed before the steps that need them.
pub(super) const FAST_MASKS_TO_RECOVER: u32 = 16;
/// Wall-clock time after which the computation of a token bitmask is cancelled.
pub(super) const MASK_TIME: Duration = Duration::from_secs(3);
/// Processor time that a request may spend on token bitmasks, in addition to `MASK_BUDGET_PER_TOKEN` per
/// output token.
pub(super) const MASK_BUDGET: Duration = Duration::from_secs(10);
/// Processor time per output token that a request may spend on token bitmasks, in addition to
/// `MASK_BUDGET`.
pub(super) const MASK_BUDGET_PER_TOKEN: Duration = Duration::from_millis(20);
/// Maximum size of a compiled grammar in bytes.
pub(super) const COMPILED_BYTES_MAX: usize = 16 << 20;
/// Maximum total size in bytes of all copies of llguidance matchers. Up to this limit, each running request
/// has its own copy of the matcher of its grammar.
pub(super) const MATCHER_COPIES_BYTES: usize = 1 << 30;
/// Maximum size of the cache of compiled grammars in bytes.
pub(super) const CACHE_BYTES: usize = 64 << 20;
/// Maximum length of a token in a grammar in bytes, a limit of llguidance's token trie; longer tokens are
/// never allowed.
pub(super) const TOKEN_BYTES_MAX: usize = 512;

/// Returns the grace period: the time for which a step waits for token bitmasks after `expected`, the
/// expected duration of its forward pass. The wait delays all rows of the step.
pub(super) fn mask_grace_period(expected: Duration) -> Duration {
    let [min, max] = MASK_GRACE_PERIOD;
    (expected / 20).clamp(min, max)
}

/// Returns the grace period of a step in which rows with a token bitmask have draft tokens. `expected` is
/// the expected duration of its forward pass.
pub(super) fn draft_mask_grace_period(expected: Duration) -> Duration {
    let [min, max] = DRAFT_MASK_GRACE_PERIOD;
    (expected / 4).clamp(min, max)
}

/// Returns llguidance's limits for compiling a grammar and for each token of a request.
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
        let grace_us = |us| mask_grace_period(Duration::from_micros(us)).as_micros();
        assert_eq!([0, 5_000, 20_000, 9_000_000].map(grace_us), [100, 250, 1_000, 5_000]);
        let drafts_us = |us| draft_mask_grace_period(Duration::from_micros(us)).as_micros();
        assert_eq!([0, 20_000, 9_000_000].map(drafts_us), [2_000, 5_000, 10_000]);
    }
}
