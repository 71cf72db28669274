//! Deterministic simulation of the deciding arm: the real scheduler and KV cache, simulated links,
//! executors and clients, one seeded source of chance, invariants after every tick.
//!
//! A failure is a seed: `just sim SEED` replays it with a readable trace. Files: `setup` and
//! `requests` draw a world, `world` moves its clock, `people` and `devices` live in it, `links` break, the engine has a
//! `standstill`, `absorb` takes in what it decides and `finish` the end. Checks, named by invariant: `batch_checks`,
//! `service_checks`, `client`, `mirror`, `names`, `subscriber`, `vigil`.

#[path = "../support/cursor.rs"]
mod cursor;
#[path = "../support/hash_model.rs"]
mod hash_model;

mod absorb;
mod batch_checks;
mod broken;
#[cfg(feature = "planted")]
mod canary;
mod chance;
mod client;
mod device_tests;
mod devices;
mod executor;
mod finish;
mod happening;
mod inside;
mod links;
mod mask_maker;
mod mirror;
mod names;
mod people;
mod regressions;
mod requests;
mod service_checks;
mod setup;
mod show;
mod standstill;
mod subscriber;
mod suite;
mod swarm;
mod trace;
mod vigil;
mod world;
