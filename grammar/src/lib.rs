//! Structured output: from what a request asks of its text to the mask of each of its tokens.
//!
//! - A request handler describes what it wants as a [`OutputConstraint`]: a JSON schema, a regular expression, a
//!   choice, or a grammar in llguidance's dialect of Lark, by [`OutputConstraint::new`]. This is the one door, also
//!   for what is not a field of its own: `tool_choice` writes a grammar and passes `GrammarSpec::Lark`. A constraint
//!   may begin behind a marker in the output ([`OutputConstraint::after`]): the end of the reasoning. Where a chat
//!   request is converted, `CompletionParams::constraint` takes it.
//! - [`GrammarCompilePool::compile`] makes it a [`CompiledGrammar`] grammar on threads of its own, under limits, once it has passed a
//!   trial in a process that can be killed (`worker/`), or says why not; the request waits outside the scheduler
//!   (`EngineClient::hold`).
//! - Each choice gets a [`SessionSeed`], and of it, once it runs, a [`GrammarSession`], which follows its committed tokens and
//!   nothing else: a preempted or recomputed request needs no care here.
//! - A [`ThinkingBudget`] ends an output's reasoning in time, with or without a grammar behind it: a [`DecodingGuide`] has both. Its
//!   masks begin where the budget may be spent, and end with the reasoning.
//! - The engine's thread owns [`MaskWorkers`]: they hold the sessions, and while the device runs the forward
//!   pass of a step they work out which tokens its masked rows may take, and tell the executor. A step does not
//!   wait for masks that are late.
//!
//! Knows token ids and their bytes, but no tokenizer and no HTTP: whoever starts [`GrammarCompilePool`] brings a
//! [`GrammarVocabulary`].

#![forbid(unsafe_code)]

mod cache;
mod compile;
mod compile_pool;
mod compile_thread;
mod constraint;
mod decimal_number;
mod decoding_guide;
mod error_message;
mod limits;
mod mask_session;
mod mask_workers;
mod matcher_copies;
mod number_keywords;
#[cfg(test)]
mod number_tests;
mod schema_cost;
mod session;
mod step_mask_collector;
pub mod sync;
#[cfg(test)]
mod tests;
mod thinking_budget;
mod timings;
mod vocabulary;
mod worker;
pub mod worker_process;

pub use compile::{CompiledGrammar, DryRunReport, GrammarCompiler, GrammarError};
pub use compile_pool::GrammarCompilePool;
pub use constraint::{GrammarSpec, JsonWhitespace, OutputConstraint};
pub use decoding_guide::DecodingGuide;
pub use limits::{NESTING_MAX, TEXT_BYTES_MAX};
pub use mask_session::MaskEvent;
pub use mask_workers::MaskWorkers;
pub use session::{GrammarSession, SessionSeed};
pub use thinking_budget::{
    ReasoningState, ReasoningTracker, ReasoningTrackerFactory, ThinkingBudget,
};
pub use timings::{BOUNDS_US, DurationHistogram, GrammarTimings};
pub use vocabulary::{EncodeFn, GrammarVocabulary};
pub use worker::serve as serve_trials;

use crate::worker_process::yield_to_others;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Of what no test draws orders of: `sync::lock` is for the rest.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
