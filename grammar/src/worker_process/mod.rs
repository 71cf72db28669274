//! What the worker processes of a server have in common: memory limits and messages.
//!
//! Work of a request that no limit inside a library bounds runs in a worker process: grammars are tried in one (`grammar/worker`), templates
//! of requests are rendered in one (`text/template`).

mod limits;
mod message;
mod program;

pub use limits::{ARENA_RESERVE, limit_memory, yield_to_others};
pub use message::{EPOCH, decode_message, encode_message};
pub use program::WorkerProgram;
