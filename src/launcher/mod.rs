//! Start-up and shutdown of a server and of its child processes: model files, executors, engine, listeners,
//! signals.

mod child_process;
pub mod demo_model;
pub mod device_detection;
mod engine_start;
pub mod executor_child;
mod executor_program;
pub mod grammar_worker;
pub mod listeners;
pub mod model_files;
mod open_server;
mod parser_selection;
mod pooling;
pub mod serve;
pub mod server_info;
pub mod settings;
pub mod shutdown;
pub mod signals;
mod start_policy;
pub mod template_worker;
pub mod worker_node;
