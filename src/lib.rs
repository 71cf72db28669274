//! The `hadron` binary as a library, so that integration tests can reach its parts.

pub mod config;
pub mod text;
