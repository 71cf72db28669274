//! End-to-end tests: the server over real sockets, and its executors and nodes as real processes.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]
#![allow(clippy::print_stdout, reason = "scores are shown even where they pass")]

#[path = "../support/deadlines.rs"]
mod deadlines;
#[path = "../../kernels/tests/emulated_gpu/mod.rs"]
mod emulated_gpu;
#[path = "../support/fault_proxy.rs"]
mod fault_proxy;
#[path = "../support/hash_model.rs"]
mod hash_model;
#[path = "../support/http_client.rs"]
mod http_client;
#[path = "../support/kv_event_replay.rs"]
mod kv_event_replay;
#[path = "../sim/rng.rs"]
mod rng;
#[path = "../support/seed_cursor.rs"]
mod seed_cursor;
#[path = "../support/small_tokenizer.rs"]
mod small_tokenizer;
#[path = "../support/test_server.rs"]
mod test_server;

use emulated_gpu::bounded_child;

mod accuracy;
mod accuracy_deepseek;
mod amd_scripts;
mod attack;
mod bench_ops;
mod chaos;
mod device_faults;
mod doctor;
mod health;
mod hostile_grammars;
mod http;
mod invariance;
mod kills;
mod random_grammars;
mod random_mixes;
mod random_schemas;
mod soak;
