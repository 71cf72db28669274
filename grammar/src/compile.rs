//! Compiles a constraint into a grammar, or returns a validation error that explains why it cannot be
//! compiled.

use super::constraint::{GrammarSpec, JsonWhitespace, OutputConstraint};
use super::error_message::client_message;
use super::limits::{
    COMPILE_TIME, COMPILED_BYTES_MAX, MASK_SLOW_IN_DRY_RUN, NESTING_MAX, TEXT_BYTES_MAX,
    WORKER_BYTES, parser_limits,
};
use super::llguidance_grammar::LlguidanceGrammar;
use super::lock;
use super::matcher_copies::{MatcherCopy, MatcherCopyBudget};
use super::session::{GrammarSession, GrammarSessionFactory};
use super::timings::thread_cpu_time;
use super::vocabulary::{GrammarVocabulary, TokenTrie};
use llguidance::toktrie::TokEnv;
use llguidance::{Matcher, ParserFactory};
use protocol::Token;
use serde::{Deserialize, Serialize};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Estimated size of a compiled grammar in bytes per byte of grammar text, excluding the lexer.
const BYTES_PER_TEXT_BYTE: usize = 64;
/// Number of random texts that a dry run (test compilation before a grammar is used) generates.
const DRY_RUN_TEXTS: u32 = 4;
/// Maximum number of tokens of each random text that a dry run (test compilation) generates.
const DRY_RUN_TOKENS: u32 = 12;

/// Reason why a grammar could not be compiled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GrammarError {
    /// The text of the grammar is too long.
    #[error("the grammar has {bytes} bytes, the limit is {TEXT_BYTES_MAX}")]
    TooLong {
        /// Length of the grammar text in bytes.
        bytes: usize,
    },
    /// The brackets of the grammar are nested too deeply.
    #[error("the grammar nests {depth} brackets, the limit is {NESTING_MAX}")]
    TooDeep {
        /// Nesting depth of the brackets.
        depth: usize,
    },
    /// The compiled grammar is too large.
    #[error("the compiled grammar has {bytes} bytes, the limit is {COMPILED_BYTES_MAX}")]
    TooLarge {
        /// Size of the compiled grammar in bytes.
        bytes: usize,
    },
    /// The grammar is invalid or contains constraints that cannot be enforced.
    #[error("{0}")]
    Invalid(String),
    /// The whitespace pattern of a JSON constraint is invalid.
    #[error("{0}")]
    InvalidSpaces(String),
    /// The compiler (llguidance) failed with an internal error that is not shown to the client.
    #[error("the grammar cannot be compiled")]
    Failed {
        /// Error text of llguidance, for the log only.
        detail: String,
    },
    /// The dry run (test compilation in a worker process) exceeded its time limit.
    #[error("the grammar took longer than {} ms to compile", COMPILE_TIME.as_millis())]
    TooSlow,
    /// The dry run (test compilation) got so little processor time, because the machine is overloaded, that
    /// the cost of the grammar is unknown.
    #[error(
        "the dry run of the grammar got {processor_ms} ms of processor time in {waited_ms} ms: the machine is overloaded"
    )]
    Starved {
        /// Wall-clock time of the dry run (test compilation) in milliseconds.
        waited_ms: u64,
        /// Processor time of the dry run (test compilation) in milliseconds, with a resolution of ten
        /// milliseconds.
        processor_ms: u64,
    },
    /// The worker process exited during the dry run (test compilation), and a new worker process that
    /// repeated the dry run exited too.
    #[error(
        "the worker process of the grammar ended ({how}); its memory limit is {} MiB",
        WORKER_BYTES >> 20
    )]
    WorkerCrashed {
        /// Exit status of the worker process.
        how: String,
    },
    /// No worker process can be started; the grammar is not the cause.
    #[error("the grammar worker process cannot be started")]
    WorkerUnavailable {
        /// Reason why no worker process can be started, for the log only.
        cause: String,
    },
    /// The compile queue is full.
    #[error("the compile queue has {waiting} grammars, the limit is {limit}")]
    QueueFull {
        /// Number of queued grammars.
        waiting: usize,
        /// Maximum number of queued grammars.
        limit: usize,
    },
    /// The grammar waited too long in the compile queue.
    #[error("the grammar waited {waited_ms} ms in the compile queue, the limit is {limit_ms} ms")]
    QueueTimeout {
        /// Time that the grammar waited in the compile queue, in milliseconds.
        waited_ms: u64,
        /// Maximum time that a grammar may wait in the compile queue, in milliseconds.
        limit_ms: u64,
    },
}

/// Grammar compiler for one tokenizer.
pub struct GrammarCompiler {
    factory: ParserFactory,
    end_ids: Arc<[Token]>,
    matcher_copies: MatcherCopyBudget,
}

/// Compiled grammar. Clones share the underlying matcher.
#[derive(Clone)]
pub struct CompiledGrammar {
    /// Matcher in the state before the first token. Each request uses a deep copy, as long as all copies
    /// fit in `MATCHER_COPIES_BYTES`, so that the resources used by one request do not count towards the
    /// limits of other requests.
    prototype: Arc<Mutex<Matcher>>,
    end_ids: Arc<[Token]>,
    matcher_copies: MatcherCopyBudget,
    /// Estimated size of the compiled grammar in bytes.
    pub(super) bytes: usize,
    /// Whether the grammar's token bitmasks take so long to compute that engine steps must not wait for
    /// them. Measured in the dry run (test compilation) and in each request.
    pub(super) is_slow: Arc<AtomicBool>,
}

/// Result of a successful dry run (test compilation) of a grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DryRunReport {
    /// Maximum processor time of a token bitmask computed in the dry run.
    pub(super) slowest_mask: Duration,
}

impl GrammarCompiler {
    /// Creates a compiler for a vocabulary.
    ///
    /// Errors: a message for the client if grammars cannot be enforced with this vocabulary.
    pub fn new(vocabulary: GrammarVocabulary) -> Result<Self, String> {
        let end_ids: Arc<[Token]> = vocabulary.end_ids.clone().into();
        let trie = TokenTrie::new(vocabulary).ok_or("the model has no end-of-text token")?;
        let env: TokEnv = Arc::new(trie);
        let factory = ParserFactory::new_simple(&env);
        let mut factory = factory.map_err(|error| {
            tracing::error!(%error, "grammars cannot be enforced");
            "grammars cannot be enforced with this tokenizer"
        })?;
        factory.quiet();
        *factory.limits_mut() = parser_limits();
        Ok(Self { factory, end_ids, matcher_copies: MatcherCopyBudget::default() })
    }

    /// Returns the total size in bytes of the matcher copies of all requests.
    #[cfg(test)]
    pub(super) fn matcher_copy_bytes(&self) -> usize {
        self.matcher_copies.bytes_in_use()
    }

    /// Compiles a constraint and generates a few random texts that the grammar allows, without a time limit.
    ///
    /// Errors: the constraint is invalid or too large, or exceeds the limits while texts are generated.
    pub fn dry_run(&self, constraint: &OutputConstraint) -> Result<DryRunReport, GrammarError> {
        let result = catch_compiler_panic(constraint, || self.sample_masks(constraint));
        let GrammarSpec::Json { whitespace: JsonWhitespace::Pattern(regex), .. } = &constraint.spec
        else {
            return result;
        };
        result.map_err(|error| {
            let pattern =
                OutputConstraint::new(GrammarSpec::Regex(regex.clone()), constraint.param.clone());
            match catch_compiler_panic(&pattern, || self.matcher(&pattern)) {
                Ok(_) => error,
                Err(failed @ GrammarError::Failed { .. }) => failed,
                Err(pattern_error) => GrammarError::InvalidSpaces(pattern_error.to_string()),
            }
        })
    }

    /// Compiles a constraint after a successful dry run (test compilation that measured its time and
    /// memory). Takes about as long as the dry run.
    ///
    /// Errors: the constraint is invalid or too large.
    pub fn compile(
        &self,
        constraint: &OutputConstraint,
        report: DryRunReport,
    ) -> Result<CompiledGrammar, GrammarError> {
        let (matcher, bytes) = catch_compiler_panic(constraint, || self.matcher(constraint))?;
        let prototype = Arc::new(Mutex::new(matcher));
        let (end_ids, matcher_copies) = (Arc::clone(&self.end_ids), self.matcher_copies.clone());
        let is_slow = Arc::new(AtomicBool::new(report.slowest_mask > MASK_SLOW_IN_DRY_RUN));
        Ok(CompiledGrammar { prototype, end_ids, matcher_copies, bytes, is_slow })
    }

    fn matcher(&self, constraint: &OutputConstraint) -> Result<(Matcher, usize), GrammarError> {
        let LlguidanceGrammar { grammar, text_bytes, shows_positions } =
            LlguidanceGrammar::of(constraint)?;
        let parser = self.factory.create_parser(grammar);
        let parser = parser.map_err(|error| client_message(&error, shows_positions))?;
        let bytes = parser.parser.lexer_stats().num_bytes + BYTES_PER_TEXT_BYTE * text_bytes;
        if bytes > COMPILED_BYTES_MAX {
            return Err(GrammarError::TooLarge { bytes });
        }
        Ok((Matcher::new(Ok(parser)), bytes))
    }

    fn sample_masks(&self, constraint: &OutputConstraint) -> Result<DryRunReport, GrammarError> {
        let (matcher, _) = self.matcher(constraint)?;
        let mut slowest_mask = Duration::ZERO;
        for text_index in 0..DRY_RUN_TEXTS {
            let session =
                GrammarSession::new(matcher.deep_clone(), Arc::clone(&self.end_ids), false);
            slowest_mask = slowest_mask.max(
                follow_random_text(session, text_index)
                    .map_err(|error| client_message(&error, false))?,
            );
        }
        Ok(DryRunReport { slowest_mask })
    }
}

/// Runs `work`, which calls the compiler, and converts a panic to [`GrammarError::Failed`].
fn catch_compiler_panic<T>(
    constraint: &OutputConstraint,
    work: impl FnOnce() -> Result<T, GrammarError>,
) -> Result<T, GrammarError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        tracing::error!(param = constraint.param, "the grammar compiler panicked");
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
        Err(GrammarError::Failed { detail: format!("the compiler panicked: {message}") })
    })
}

/// Generates the first tokens of a random text that the grammar allows, and returns the maximum processor
/// time of a token bitmask. Fails if the computation for a token exceeds the limits. Most grammars that
/// exceed the limits do so within the first tokens, and are thus rejected before an output starts.
fn follow_random_text(mut session: GrammarSession, text_index: u32) -> anyhow::Result<Duration> {
    let mut slowest = Duration::ZERO;
    for step in 0..DRY_RUN_TOKENS {
        let cpu_before = thread_cpu_time();
        let mask = session.try_mask()?; // An unsatisfiable grammar fails at its first mask.
        slowest = slowest.max(thread_cpu_time().saturating_sub(cpu_before));
        if session.is_finished() {
            break;
        }
        let choice = (text_index * DRY_RUN_TOKENS + step).wrapping_mul(0x9e37_79b9) >> 8;
        let Some(token) = session.choose_token(&mask, choice) else { break };
        session.advance(&[token]);
    }
    Ok(slowest)
}

impl CompiledGrammar {
    /// Creates the factory of the grammar sessions (parser states) of one request. If `ignores_end` is set,
    /// end-of-text tokens are allowed only where no other token is allowed.
    pub fn session_seed(&self, ignores_end: bool) -> GrammarSessionFactory {
        GrammarSessionFactory::new(self.clone(), ignores_end)
    }

    /// Copies the grammar's matcher for one request.
    pub(super) fn matcher_copy(&self) -> MatcherCopy {
        self.matcher_copies.copy_matcher(&lock(&self.prototype), self.bytes)
    }

    /// Returns the ids of the end-of-text tokens.
    pub(super) fn end_ids(&self) -> &Arc<[Token]> {
        &self.end_ids
    }
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledGrammar").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
