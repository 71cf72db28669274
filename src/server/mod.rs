//! The HTTP face: OpenAI-compatible routes, probes, limits and deadlines.
//!
//! From the socket inwards: `listen` accepts, `connection` and `timed_io` keep deadlines, `gate` checks headers and
//! catches panics, `routes` finds the handler. Below the handlers only token ids travel.

pub mod absent;
pub mod admin;
pub mod app;
mod bare_reply;
pub mod body;
pub mod connection;
pub mod cross_origin;
pub mod debug;
pub mod error;
pub mod fields;
pub mod gate;
pub mod health;
pub mod ids;
pub mod json;
pub mod keys;
mod kv_events;
pub mod listen;
pub mod loads;
pub mod messages;
pub mod metrics;
pub mod models;
pub mod observe;
pub mod openai;
pub mod openapi;
mod path;
pub mod piece_body;
pub mod probes;
pub mod profile;
pub mod responses;
pub mod routes;
pub mod sse;
pub mod status;
pub mod text_pool;
mod timed_io;
pub mod tokenisation;
pub mod trace;
mod trace_file;
mod value_size;
