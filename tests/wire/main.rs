//! Tests of the format and protocol of KV events: encoding, order of batches, and the set of blocks that a
//! subscriber builds.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]
#![allow(clippy::print_stdout, reason = "prints measured times also if tests pass")]

#[path = "../support/kv_event_replay.rs"]
mod kv_event_replay;

mod msgspec_payloads;
mod round_trip;
mod schedule_rng;
mod schedules;
mod sockets;
