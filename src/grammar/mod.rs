//! Structured output: from what a request asks of its text to the mask of each of its tokens.
//!
//! - A request handler describes what it wants as a [`Constraint`]: a JSON schema, a regular expression, a
//!   choice, or a grammar in llguidance's dialect of Lark, by [`Constraint::new`]. This is the one door, also
//!   for what is not a field of its own: `tool_choice` writes a grammar and passes `Form::Lark`. A constraint
//!   may begin behind a marker in the output ([`Constraint::after`]): the end of the reasoning. Where a chat
//!   request is converted, `Params::constraint` takes it.
//! - [`Grammars::compile`] makes it a [`Compiled`] grammar on threads of its own, under limits, once it has passed a
//!   trial in a process that can be killed (`trial/`), or says why not; the request waits outside the scheduler
//!   (`EngineClient::hold`).
//! - Each choice gets a [`Seed`], and of it, once it runs, a [`Session`], which follows its committed tokens and
//!   nothing else: a preempted or recomputed request needs no care here.
//! - A [`Budget`] ends an output's reasoning in time, with or without a grammar behind it: a [`Guide`] has both. Its
//!   masks begin where the budget may be spent, and end with the reasoning.
//! - The engine's thread owns [`MaskWorkers`]: they hold the sessions, and while the device runs the forward
//!   pass of a step they work out which tokens its masked rows may take, and tell the executor. A step does not
//!   wait for masks that are late.
//!
//! Knows token ids and their bytes, but no tokenizer and no HTTP: whoever starts [`Grammars`] brings a
//! [`Vocabulary`].

mod budget;
mod cache;
mod compile;
mod constraint;
mod copies;
mod decimal_number;
mod explanation;
mod guard;
mod guide;
mod lane;
mod limits;
mod mask_seat;
mod mask_step;
mod mask_workers;
mod number_keywords;
#[cfg(test)]
mod number_tests;
mod pool;
mod session;
#[cfg(test)]
mod tests;
mod timings;
mod trial;
mod vocabulary;

pub use budget::{Budget, NewReader, Reader, Reading};
pub use compile::{Compiled, Compiler, Findings, GrammarError};
pub use constraint::{Constraint, Form, Spaces};
pub use guide::Guide;
pub use limits::{NESTING_MAX, TEXT_BYTES_MAX};
pub use mask_seat::News;
pub use mask_workers::MaskWorkers;
pub use pool::Grammars;
pub use session::{Seed, Session};
pub use timings::{BOUNDS_US, GrammarTimings, Timings};
pub use trial::serve as serve_trials;
pub use vocabulary::{Encode, Vocabulary};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What threads that may have much to do leave to others, in steps of the system's scale.
const NICENESS: i32 = 10;

/// Gives this thread a lower priority.
fn yield_to_others() {
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "grammars get as much of the processor as everything else");
    }
}

/// Of what no test draws orders of: `crate::sync::lock` is for the rest.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
