//! HTTP server: OpenAI-compatible routes, probes, limits and timeouts.
//!
//! A request passes these modules: `listener` accepts connections, `connection` and `client_socket` enforce
//! timeouts, `middleware` checks headers and catches panics, and `routes` calls the handler. Handlers pass
//! only token ids to the engine.

#![forbid(unsafe_code)]

mod access_log;
mod access_record;
mod admin;
mod anthropic;
mod api_error;
mod app;
mod auth;
mod client_socket;
mod compaction_threshold;
mod connection;
mod context_overflow;
mod conversations;
mod cors;
#[cfg(test)]
#[path = "../../tests/support/deadlines.rs"]
mod deadlines;
mod debug;
mod docs_page;
mod guarded_body;
mod hyper_error_reply;
mod ignored_parts;
mod json_heap_size;
mod kv_event_sources;
pub mod listener;
mod loads;
mod metrics;
mod metrics_middleware;
mod middleware;
mod model_names;
mod models;
mod object_lru;
pub mod openai;
pub mod openapi;
mod path_param;
mod piece_body;
pub mod pooling;
mod probes;
mod profile;
mod query_parameters;
mod rejection_log;
mod render;
mod request_body;
mod request_fields;
mod request_ids;
mod request_spans;
mod request_trace;
mod request_trace_file;
mod responses;
pub mod routes;
mod runner_guard;
mod sglang;
mod span_attributes;
mod sse;
mod status_page;
mod strict_json;
mod template_value_json;
mod text_pool;
mod throughput_log;
mod tokenize;
mod unread_body;
mod unsupported_routes;

pub use app::{AppState, ModelCard, ServerOptions, ServingContext};
pub use auth::{ApiKeys, RouteAccess};
pub use connection::ConnectionTimeouts;
pub use cors::CorsConfig;
pub use model_names::ServedModelNames;
pub use request_fields::RequestFields;
pub use request_spans::{RequestSpanExporter, SpanEndpointError};
pub use request_trace::RequestTracer;
pub use strict_json::JsonValue;
pub use throughput_log::{THROUGHPUT_INTERVAL, log_throughput};
pub use unsupported_routes::UNSUPPORTED_ROUTES;
