//! Benchmarks without external models: `cargo test --release --test bench -- --ignored --nocapture`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement prints, and panics if it cannot go on"
)]

#[path = "../support/bounded_child.rs"]
mod bounded_child;
#[path = "../support/deadlines.rs"]
mod deadlines;
#[path = "../support/hash_model.rs"]
mod hash_model;
#[path = "../support/http_client.rs"]
mod http_client;
#[path = "../support/kv_event_replay.rs"]
mod kv_event_replay;
#[allow(dead_code, reason = "each test binary uses a part")]
#[path = "../sim/rng.rs"]
mod rng;
#[path = "../support/small_tokenizer.rs"]
mod small_tokenizer;
#[path = "../support/test_server.rs"]
mod test_server;

mod http;
mod kv_overflow;
mod metrics_page;
mod output_parsers;
