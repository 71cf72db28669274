//! KV events: encoding, order, and the resulting index of a subscriber.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "measured times are shown even where they pass")]

#[path = "../support/kv_event_replay.rs"]
mod kv_event_replay;

mod msgspec_payloads;
mod round_trip;
mod schedule_rng;
mod schedules;
mod sockets;
