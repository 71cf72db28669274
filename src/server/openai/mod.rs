//! The OpenAI routes. An endpoint is a folder: types, validate, convert, reply, handler.

pub mod assistant_message;
pub mod chat;
pub mod choice;
mod chunk_frame;
pub mod collect;
pub mod completions;
pub mod endpoint;
pub mod generation;
#[cfg(test)]
mod logprob_values;
pub mod logprobs;
pub mod memory_reservation;
pub mod params;
pub mod reply_parts;
mod structured_outputs;
pub mod submit;
pub mod thinking_budget;
pub mod unsupported_fields;
pub mod usage;
