//! Completions, chat, probes, limits, faults.

mod faults;
mod limits;
mod malformed;
mod refusals;
mod replies;
