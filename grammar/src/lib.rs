//! Structured output: from the constraint of a request to the grammar bitmask of each of its tokens.
//!
//! - A request handler describes the constraint as an [`OutputConstraint`]: a JSON schema, a regular
//!   expression, a choice, or a grammar in llguidance's dialect of Lark. [`OutputConstraint::new`] is the
//!   only entry point, also for constraints without a request field of their own: `tool_choice` generates a
//!   grammar and passes `GrammarSpec::Lark`. A constraint may start after a marker in the output
//!   ([`OutputConstraint::start_after`]), the end of the reasoning. The conversion of a chat request stores
//!   the constraint in `CompletionParams::constraint`.
//! - [`GrammarCompilePool::compile`] compiles the constraint into a [`CompiledGrammar`] on separate threads,
//!   with limits, after a dry run in a process that can be killed (`worker/`), or returns an error. Meanwhile
//!   the request waits outside the scheduler (`EngineClient::hold`).
//! - Each choice gets a [`GrammarSessionFactory`] and creates a [`GrammarSession`] from it when it starts
//!   running. A session follows committed tokens, so preemption and recomputation need no special case; after
//!   it has followed draft tokens, it returns to the committed ones.
//! - A [`ThinkingBudget`] limits the reasoning of an output, with or without a grammar after it: a
//!   [`DecodingGuide`] has both. Masks of a budget start at the first token that may exceed it and end with
//!   the reasoning.
//! - The engine's thread owns [`MaskWorkers`]. They hold the sessions, compute the bitmasks of the masked
//!   rows of a step while the device runs its forward pass, and send them to the executor. A step does not
//!   wait for overdue masks.
//!
//! The crate depends on token ids and their bytes, not on a tokenizer or on HTTP: the code that starts
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
mod engine_grammar;
mod error_message;
pub mod lark_text;
mod limits;
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
mod unconstrained_head;
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
pub use unconstrained_head::{PreambleEnd, UnconstrainedPreamble};
pub use vocabulary::{EncodeFn, GrammarVocabulary};
pub use worker::serve as serve_dry_runs;

use crate::worker_process::lower_priority;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a standard-library mutex and ignores poisoning. Code whose thread interleavings are tested uses
/// `sync::lock` instead.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
