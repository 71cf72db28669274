//! Starts and stops a server: model, executor, engine, sockets, signals.

mod child_process;
pub mod demo;
pub mod device;
pub mod engine_thread;
pub mod executor;
pub mod grammar_worker;
pub mod host;
pub mod info;
pub mod listen;
pub mod model_files;
pub mod nodes;
mod parsers;
pub mod serve;
pub mod settings;
pub mod shutdown;
pub mod signals;
mod silence;
mod start_rules;
pub mod start_up;
pub mod station;
pub mod step_watch;
pub mod supervisor;
pub mod template_worker;
