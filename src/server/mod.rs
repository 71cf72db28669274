//! The HTTP face: OpenAI-compatible routes, probes, limits and deadlines.
//!
//! From the socket inwards: `listen` accepts, `connection` and `client_socket` keep deadlines, `middleware` checks headers and
//! catches panics, `routes` finds the handler. Below the handlers only token ids travel.

pub mod admin;
pub mod anthropic;
pub mod api_error;
pub mod app;
pub mod auth;
mod client_socket;
pub mod connection;
pub mod cors;
pub mod debug;
mod hyper_error_reply;
mod json_heap_size;
mod kv_event_sources;
pub mod listener;
pub mod loads;
pub mod metrics;
pub mod metrics_middleware;
pub mod middleware;
pub mod models;
pub mod openai;
pub mod openapi;
mod path_param;
pub mod piece_body;
pub mod probes;
pub mod profile;
pub mod request_body;
pub mod request_fields;
pub mod request_ids;
pub mod request_trace;
mod request_trace_file;
pub mod responses;
pub mod routes;
pub mod sse;
pub mod status_page;
pub mod strict_json;
pub mod text_pool;
pub mod tokenize;
pub mod unsupported_routes;
