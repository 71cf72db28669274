//! Completions, chat, probes, limits, faults.

mod access;
mod drain;
mod executor_process;
mod faults;
mod forced_calls;
mod grammar_process;
mod kv_events;
mod limits;
mod malformed;
mod messages;
mod metrics;
mod nodes;
mod openapi;
mod operators;
mod process;
mod profile;
mod ranks;
mod refusals;
mod replicas;
mod replies;
mod responses;
mod series;
mod shared_experts;
mod structured;
mod thinking;
mod tools;
