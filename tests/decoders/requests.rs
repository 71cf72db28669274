//! Bodies of completions and chats.

use hadron::server::fields::Fields;
use hadron::server::json::Json;
use hadron::server::openai::params::{Bounds, Defaults};
use hadron::server::openai::{chat, completions};

const BOUNDS: Bounds = Bounds {
    vocab_size: 320,
    max_model_len: 4_096,
    logprobs_max: Some(20),
    replicas: 2,
    priorities: true,
};

pub(crate) fn run(data: &[u8]) {
    let fields = || Json::parse(data).and_then(Fields::of_body);
    let defaults = Defaults::default();
    if let Ok(mut fields) = fields() {
        let _ = completions::check(&mut fields, &BOUNDS, &defaults);
    }
    if let Ok(mut fields) = fields() {
        let _ = chat::check(&mut fields, &BOUNDS, &defaults);
    }
}
