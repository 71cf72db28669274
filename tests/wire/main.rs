//! KV events: their bytes, their order, and what a subscriber makes of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "measured times are shown even where they pass")]

#[path = "../support/kv_feed.rs"]
mod kv_feed;

mod chance;
mod fixtures;
mod round_trip;
mod schedules;
mod sockets;
