//! Resource limits of grammars. A hostile grammar harms only its own request.

use llguidance::api::ParserLimits;
use std::time::Duration;

/// Maximum length of a grammar's text in bytes.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Maximum nesting depth of brackets in a grammar; checked before recursive parsers read the grammar.
pub const NESTING_MAX: usize = 128;
/// Maximum number of texts of a choice constraint that become separate lexemes.
pub(super) const SEPARATE_CHOICES_MAX: usize = 100;
/// Maximum time of a dry run. It is short so that the client of a hostile grammar gets its error within a
/// second.
pub(super) const COMPILE_TIME: Duration = Duration::from_millis(900);
/// Maximum time that a constraint may wait in the compile queue.
pub(super) const QUEUE_TIME: Duration = Duration::from_secs(10);
/// Maximum number of constraints in the compile queue.
pub(super) const WAITING_MAX: usize = 1_024;
/// Number of compile threads, each with a worker process for dry runs.
pub(super) const COMPILE_THREADS: usize = 2;
/// Maximum time for a worker process to start and to load the vocabulary.
pub(super) const WORKER_START_TIME: Duration = Duration::from_mins(1);
/// Processor time that a dry run is granted even if that takes longer than `COMPILE_TIME` on an overloaded
/// machine. A timeout with less processor time is attributed to the machine and not to the grammar.
pub(super) const DRY_RUN_CPU_TIME_MIN: Duration = Duration::from_millis(50);
/// Wall-clock time after which a dry run is aborted in any case.
pub(super) const DRY_RUN_TIME_MAX: Duration = Duration::from_secs(3);
/// Maximum address space of a worker process in bytes, in addition to what it has at its start.
pub(super) const WORKER_BYTES: u64 = 1 << 30;
/// Stack size of the dry-run thread in bytes. Parsers recurse; the system allocates only the pages that are
/// touched.
pub(super) const DRY_RUN_STACK_BYTES: usize = 128 << 20;
/// Stack size in bytes of a thread that compiles after the dry run. It is larger than that of the dry run, so
/// that no grammar overflows this stack first.
pub(super) const COMPILE_STACK_BYTES: usize = 256 << 20;
/// Stack size in bytes of a thread that computes masks.
pub(super) const MASK_STACK_BYTES: usize = 64 << 20;
/// Minimum and maximum time that a step waits for masks beyond its expected duration.
const MASK_GRACE_PERIOD: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(5)];
/// Minimum and maximum time that a step with draft tokens in masked rows waits for masks beyond its expected
/// duration. It is longer, because the executor reports the draft tokens first, and a step that misses their
/// masks loses the draft tokens.
const DRAFT_MASK_GRACE_PERIOD: [Duration; 2] =
    [Duration::from_millis(2), Duration::from_millis(10)];
/// Processor time above which a mask is slow. After a slow mask, the masks of all requests of the grammar are
/// precomputed, so that no step waits for them.
pub(super) const MASK_SLOW: Duration = Duration::from_millis(2);
/// Processor time of a mask in the dry run above which all masks of the grammar count as slow from the first
/// one on.
pub(super) const MASK_SLOW_IN_DRY_RUN: Duration = Duration::from_millis(5);
/// Maximum processor time of a mask that counts as fast.
pub(super) const MASK_FAST: Duration = Duration::from_millis(1);
/// Number of consecutive fast masks of a request after which its masks are no longer precomputed.
pub(super) const FAST_MASKS_TO_RECOVER: u32 = 16;
/// Wall-clock time after which the computation of a mask is cancelled.
pub(super) const MASK_TIME: Duration = Duration::from_secs(3);
/// Processor time that a request may spend on its masks, in addition to `MASK_BUDGET_PER_TOKEN`.
pub(super) const MASK_BUDGET: Duration = Duration::from_secs(10);
/// Processor time that a request may spend on its masks for each of its output tokens.
pub(super) const MASK_BUDGET_PER_TOKEN: Duration = Duration::from_millis(20);
/// Maximum bytes of a compiled grammar.
pub(super) const COMPILED_BYTES_MAX: usize = 16 << 20;
/// Maximum bytes of all matcher copies. While they fit, each running request has its own copy.
pub(super) const MATCHER_COPIES_BYTES: usize = 1 << 30;
/// Maximum bytes of the cache of compiled grammars.
pub(super) const CACHE_BYTES: usize = 64 << 20;
/// Maximum bytes of a token in a grammar, a limit of llguidance's token trie; longer tokens are never
/// allowed.
pub(super) const TOKEN_BYTES_MAX: usize = 512;

/// Returns the time that a step waits for masks beyond `expected`, the expected duration of its forward pass.
/// All rows of the step wait.
pub(super) fn mask_grace_period(expected: Duration) -> Duration {
    let [min, max] = MASK_GRACE_PERIOD;
    (expected / 20).clamp(min, max)
}

/// Returns the time that a step with draft tokens in masked rows waits for masks beyond `expected`.
pub(super) fn draft_mask_grace_period(expected: Duration) -> Duration {
    let [min, max] = DRAFT_MASK_GRACE_PERIOD;
    (expected / 4).clamp(min, max)
}

/// Limits of llguidance for a grammar and for one token of a request.
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
