//! Deterministic simulation of the deciding arm: the real scheduler and KV cache, simulated links,
//! executors and clients, one seeded source of chance, invariants after every step.

#[path = "../support/hash_model.rs"]
mod hash_model;

mod device_tests;
