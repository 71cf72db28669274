//! Completions, chat, probes, limits, faults.

mod replies;
