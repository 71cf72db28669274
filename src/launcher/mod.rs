//! Starts and stops a server: model, executor, engine, sockets, signals.

mod child_process;
pub mod demo_model;
pub mod device_detection;
pub mod engine_host;
pub mod engine_loop;
pub mod executor;
pub mod grammar_worker;
mod heartbeat_timeout;
pub mod listeners;
pub mod model_files;
pub mod nodes;
mod parser_selection;
pub mod replica_handle;
pub mod serve;
pub mod server_info;
pub mod settings;
pub mod shutdown;
pub mod signals;
mod start_policy;
pub mod startup;
pub mod step_clock;
pub mod supervisor;
pub mod template_worker;
