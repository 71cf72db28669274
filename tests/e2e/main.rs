//! The server over real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "scores are shown even where they pass")]

#[path = "../sim/chance.rs"]
mod chance;
#[path = "../support/cursor.rs"]
mod cursor;
#[path = "../support/fault_proxy.rs"]
mod fault_proxy;
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
#[path = "../support/watchdog.rs"]
mod watchdog;

mod accuracy;
mod accuracy_deepseek;
mod attack;
mod bench_ops;
mod chaos;
mod devices;
mod drawn_grammars;
mod health;
mod hostile_grammars;
mod http;
mod invariance;
mod kills;
mod mixes;
mod schemas;
mod soak;
