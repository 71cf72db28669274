//! Structured output: converts the constraint of a request to a grammar bitmask for each output token.
//!
//! - A request handler describes the constraint as an [`OutputConstraint`]: a JSON schema, a regular
//!   expression, a choice, or a grammar in llguidance's Lark dialect. Every constraint is created with
//!   [`OutputConstraint::new`], even if the request has no field for it: for example, `tool_choice` generates
//!   a grammar, which is passed as `GrammarSpec::Lark`. A constraint may start after an end-of-reasoning
//!   marker ([`OutputConstraint::start_after`]). For chat requests, the constraint is stored in
//!   `CompletionParams::constraint`.
//! - [`GrammarCompilePool::compile`] compiles the constraint into a [`CompiledGrammar`] on separate threads,
//!   after a dry run in a process that can be killed (`worker/`). Time and memory are limited; if a limit is
//!   exceeded, the result is an error. Until the result is known, the request waits outside the scheduler
//!   (`EngineClient::submit_deferred`).
//! - Each choice gets a [`GrammarSessionFactory`], which creates a [`GrammarSession`] when the choice starts
//!   running. A session follows committed tokens only, so preemption and recomputation need no special case.
//!   After a session has followed draft tokens, it returns to the state after the committed tokens.
//! - A [`ThinkingBudget`] limits the reasoning tokens of an output, whether or not a grammar follows the
//!   reasoning. A [`DecodingGuide`] contains the grammar and the thinking budget. Masks of a thinking budget
//!   are needed from the first token that may exceed the budget to the end of the reasoning.
//! - The engine thread owns [`MaskWorkers`], which hold the sessions. While the device runs the forward pass
//!   of a step, they compute the bitmasks of the masked rows and send them to the executor. A step does not
//!   wait for overdue masks.
//!
//! The crate depends on token ids and token bytes, but not on a tokenizer or on HTTP: the code that starts
//! [`GrammarCompilePool`] passes a [`GrammarVocabulary`].

#![forbid(unsafe_code)]

mod cache;
mod compile;
mod compile_pool;
mod compile_thread;
mod constraint;
mod decimal_number;
mod decoding_guide;
#[cfg(test)]
mod draft_tests;
mod ebnf;
mod embedded_schemas;
mod error_message;
pub mod lark_text;
mod limits;
mod llguidance_grammar;
mod mask_lookahead;
mod mask_session;
mod mask_workers;
mod matcher_copies;
mod number_keywords;
#[cfg(test)]
mod number_tests;
mod schema;
mod schema_cost;
mod session;
mod step_mask_collector;
mod structural_tag;
pub mod sync;
#[cfg(test)]
mod tests;
mod thinking_budget;
mod timings;
mod unconstrained_preamble;
mod vocabulary;
mod worker;
pub mod worker_process;

pub use compile::{CompiledGrammar, DryRunReport, GrammarCompiler, GrammarError};
pub use compile_pool::GrammarCompilePool;
pub use constraint::{GrammarSpec, JsonWhitespace, OutputConstraint};
pub use decoding_guide::DecodingGuide;
pub use ebnf::{EbnfError, ebnf_to_lark, is_ebnf, lark_pattern};
pub use limits::{NESTING_MAX, TEXT_BYTES_MAX};
pub use mask_session::MaskEvent;
pub use mask_workers::{MaskWorkers, MaskedRow};
pub use session::{GrammarSession, GrammarSessionFactory};
pub use structural_tag::{StructuralTagError, structural_tag_grammar};
pub use thinking_budget::{
    ReasoningState, ReasoningTracker, ReasoningTrackerFactory, ThinkingBudget,
};
pub use timings::{BOUNDS_US, DurationHistogram, GrammarTimings};
pub use unconstrained_preamble::{PreambleEndMarker, UnconstrainedPreamble};
pub use vocabulary::{EncodeFn, GrammarVocabulary};
pub use worker::serve as serve_dry_runs;

use crate::worker_process::lower_priority;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a standard-library mutex, ignoring poisoning. Code that is tested with random thread interleavings
/// uses `sync::lock` instead.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
