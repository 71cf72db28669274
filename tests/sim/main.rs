//! Deterministic simulation of the scheduling crates: the real scheduler and KV cache with simulated links,
//! executors and clients. All random decisions are determined by a seed. Invariants are checked after every
//! tick.
//!
//! A failure is identified by its seed: `just sim SEED` replays it with a readable trace. `sim_config` and
//! `request_generator` draw the configuration and the requests, `world` advances the clock, `client_arrivals`
//! and `executor_faults` produce events, `link_faults` breaks links, `process_pause` pauses the engine,
//! `effects` applies the scheduler's effects and `final_checks` checks the end. Invariants are checked in
//! `batch_checks`, `kv_memory`, `service_checks`, `client`, `index_mirror`, `client_ids`, `subscriber` and
//! `executor_watch`.

#[path = "../support/hash_model.rs"]
mod hash_model;
#[path = "../support/seed_cursor.rs"]
mod seed_cursor;

mod batch_checks;
mod client;
mod client_arrivals;
mod client_ids;
mod device_tests;
mod effects;
mod event_queue;
mod executor;
mod executor_faults;
mod executor_watch;
mod fault_injector;
mod final_checks;
mod index_mirror;
mod injected_faults;
mod introspection;
mod invariant;
mod kv_memory;
mod link_faults;
mod mask_worker;
mod process_pause;
mod regressions;
mod request_generator;
mod rng;
mod seed_sweep;
mod service_checks;
mod sim_config;
mod state_memory;
mod subscriber;
mod suite;
mod trace;
mod trace_format;
mod window_memory;
mod world;
