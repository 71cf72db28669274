//! Deterministic simulation of the deciding arm: the real scheduler and KV cache, simulated links,
//! executors and clients, one seeded source of chance, invariants after every tick.
//!
//! A failure is a seed: `just sim SEED` replays it with a readable trace. Files: `sim_config` and
//! `request_generator` draw a world, `world` moves its clock, `client_arrivals` and `executor_faults` live in it, `link_faults` break
//! links, the engine has a `process_pause`, `effects` takes in what it decides and `final_checks` the end. Checks, named by invariant:
//! `batch_checks`, `service_checks`, `client`, `index_mirror`, `client_ids`, `subscriber`, `executor_watch`.

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
mod final_checks;
mod index_mirror;
#[cfg(feature = "planted")]
mod injected_faults;
mod introspection;
mod invariant;
mod link_faults;
mod mask_worker;
mod process_pause;
mod regressions;
mod request_generator;
mod rng;
mod seed_sweep;
mod service_checks;
mod sim_config;
mod subscriber;
mod suite;
mod trace;
mod trace_format;
mod world;
