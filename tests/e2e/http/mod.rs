//! Completions, chat, probes, limits, faults.

mod faults;
mod limits;
mod malformed;
mod process;
mod refusals;
mod replies;
