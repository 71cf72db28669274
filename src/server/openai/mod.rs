//! The OpenAI routes. An endpoint is a folder: types, validate, convert, reply, handler.

pub mod choice;
pub mod chat;
pub mod completions;
pub mod generation;
pub mod logprobs;
pub mod params;
pub mod refused;
pub mod usage;
