//! Starts and stops a server: model, executor, engine, sockets, signals.

pub mod engine_thread;
pub mod host;
pub mod start_up;
