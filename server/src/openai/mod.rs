//! Routes of the OpenAI API. The folder of each endpoint contains its field types, validation, conversion,
//! reply and handler.

pub(crate) mod assistant_message;
pub mod chat;
pub(crate) mod choice;
pub(crate) mod collect;
pub mod completions;
pub(crate) mod endpoint;
pub(crate) mod generation;
#[cfg(test)]
mod logprob_values;
pub(crate) mod logprobs;
pub(crate) mod memory_reservation;
pub(crate) mod params;
pub(crate) mod pooling_params;
pub(crate) mod reply_parts;
pub(crate) mod spec_decode_metrics;
mod stream_chunk;
mod structural_tags;
mod structured_outputs;
pub(crate) mod submit;
pub(crate) mod thinking_budget;
pub(crate) mod unsupported_fields;
pub(crate) mod usage;

pub use endpoint::unix_time;
pub use params::{FieldBounds, SamplingDefaults};
pub use spec_decode_metrics::SpecDecodeMetricsOptions;
