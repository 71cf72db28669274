//! The OpenAI routes. An endpoint is a folder: types, validate, convert, reply, handler.

pub mod chat;
pub mod choice;
mod chunk_frame;
pub mod collect;
pub mod completions;
mod constraint;
pub mod exchange;
pub mod generation;
pub mod held;
#[cfg(test)]
mod logprob_values;
pub mod logprobs;
pub mod message;
pub mod params;
pub mod refused;
pub mod reply_parts;
pub mod submit;
pub mod thinking;
pub mod usage;
