//! Code shared by the server's worker processes: memory limits and messages.
//!
//! Request work that no library limit bounds runs in a worker process: dry runs of grammars
//! (`grammar/worker`), and rendering of chat templates sent in requests (`text/template`).

mod limits;
mod message;
mod program;

pub use limits::{ARENA_RESERVE, limit_memory, lower_priority};
pub use message::{EPOCH, decode_message, encode_message};
pub use program::WorkerProgram;
