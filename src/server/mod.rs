//! The HTTP face: OpenAI-compatible routes, probes, limits and deadlines.

mod error;
mod fields;
mod json;
