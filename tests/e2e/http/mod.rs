//! Completions, chat, probes, limits, faults.

mod access;
mod drain;
pub(crate) mod executor_process;
mod faults;
mod forced_calls;
mod grammar_process;
mod kv_events;
mod latents;
mod limits;
mod malformed;
mod messages;
mod metrics;
mod nodes;
mod openapi;
mod operators;
pub(crate) mod process;
mod profile;
pub(crate) mod ranks;
mod refusals;
mod replicas;
mod replies;
mod responses;
mod series;
mod shared_experts;
mod structured;
mod thinking;
mod tools;
