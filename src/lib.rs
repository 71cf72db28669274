//! The `hadron` binary as a library, so that integration tests can reach its parts.

pub mod bench;
pub mod client;
pub mod config;
pub mod eval;
pub mod events;
pub mod hub;
pub mod launcher;
pub mod log;
pub mod progress;
pub mod synth;
