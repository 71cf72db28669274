//! Measurements that need no model of others: `cargo test --release --test bench -- --ignored --nocapture`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement prints, and panics if it cannot go on"
)]

#[allow(dead_code, reason = "each test binary uses a part")]
#[path = "../sim/chance.rs"]
mod chance;
#[path = "../support/hash_model.rs"]
mod hash_model;
#[path = "../support/http_client.rs"]
mod http_client;
#[path = "../support/http_host.rs"]
mod http_host;
#[path = "../support/kv_feed.rs"]
mod kv_feed;
#[path = "../support/small_tokenizer.rs"]
mod small_tokenizer;

mod http;
mod kv_overflow;
mod metrics_page;
mod outputs;
