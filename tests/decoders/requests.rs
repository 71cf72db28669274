//! Fuzz target: request bodies of completions and chat completions.

use server::openai::{FieldBounds, SamplingDefaults};
use server::openai::{chat, completions};
use server::{JsonValue, RequestFields};

const BOUNDS: FieldBounds = FieldBounds {
    vocab_size: 320,
    max_model_len: 4_096,
    logprobs_max: Some(20),
    replicas: 2,
    priorities: true,
};

pub(crate) fn run(data: &[u8]) {
    let fields = || JsonValue::parse(data).and_then(RequestFields::of_body);
    let defaults = SamplingDefaults::default();
    if let Ok(mut fields) = fields() {
        let _ = completions::validate(&mut fields, &BOUNDS, &defaults);
    }
    if let Ok(mut fields) = fields() {
        let _ = chat::validate(&mut fields, &BOUNDS, &defaults);
    }
}
