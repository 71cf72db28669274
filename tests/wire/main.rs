//! KV events: their bytes, their order, and what a subscriber makes of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "measured times are shown even where they pass")]

#[path = "../support/kv_event_replay.rs"]
mod kv_event_replay;

mod msgspec_payloads;
mod round_trip;
mod schedule_rng;
mod schedules;
mod sockets;
