//! Library with the code of the `hadron` executable, for integration tests.

#![forbid(unsafe_code)]

pub mod bench;
pub mod client;
pub mod config;
#[cfg(test)]
#[path = "../tests/support/deadlines.rs"]
mod deadlines;
pub mod doctor;
pub mod eval;
pub mod events;
pub mod hub;
pub mod launcher;
pub mod log;
pub mod progress;
pub mod synth;
