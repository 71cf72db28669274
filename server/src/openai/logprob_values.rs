//! Reference implementation for tests: builds log-probabilities as JSON values. `LogprobListWriter`, which
//! writes one list entry at a time, must produce the same bytes.

use super::logprobs::{ChoiceLogprobs, TokenFormat, TokenFormatter};
use protocol::{Token, TokenLogprobs};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;
use text::Tokenizer;

const FLOOR: f32 = -9999.0;

/// Returns the token formatter of the demo model.
pub(super) fn names(token_format: TokenFormat) -> TokenFormatter {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/demo");
    TokenFormatter { tokenizer: Arc::new(Tokenizer::load(&demo).unwrap()), token_format }
}

/// Creates `count` entries with `top` top tokens each: floats that are hard to serialise, and tokens that are
/// not valid UTF-8.
pub(super) fn entries(count: usize, top: usize) -> Vec<TokenLogprobs> {
    let values = [-0.1, -1e-9, -12.345_678, f32::NEG_INFINITY, 0.0, -16_777_216.0, -3.5e-20];
    let value = |position: usize| values[position % values.len()];
    let entry = |position: usize| TokenLogprobs {
        token: (position * 37 % 300) as Token,
        logprob: value(position),
        rank: position as u32 + 1,
        top_logprobs: (0..top)
            .map(|rank| (((position + rank) * 37 % 300) as Token, value(rank + 1)))
            .collect(),
    };
    (0..count).map(entry).collect()
}

/// Builds the `logprobs` object of a chat choice: `{"content": [..]}`.
pub(super) fn chat(names: &TokenFormatter, logprobs: ChoiceLogprobs<'_>) -> Value {
    let one = |token: Token, logprob: f32| {
        let bytes = names.tokenizer.token_bytes(token);
        json!({"token": names.of(token), "logprob": logprob.max(FLOOR), "bytes": bytes})
    };
    let entry = |entry: &TokenLogprobs| {
        let mut value = one(entry.token, entry.logprob);
        let top: Vec<Value> =
            entry.top_logprobs.iter().map(|&(id, logprob)| one(id, logprob)).collect();
        value["top_logprobs"] = Value::Array(top);
        value
    };
    json!({"content": logprobs.output.iter().map(entry).collect::<Vec<_>>()})
}

/// Builds the `logprobs` object of a text completion choice, which has four lists.
pub(super) fn text(names: &TokenFormatter, logprobs: ChoiceLogprobs<'_>) -> Value {
    let prompt_entries = std::iter::once(None).chain(logprobs.prompt.iter().map(Some));
    let echoed = logprobs.echoed.iter().copied().zip(prompt_entries);
    let entries = echoed.chain(logprobs.output.iter().map(|entry| (entry.token, Some(entry))));
    let (mut tokens, mut chosen) = (Vec::new(), Vec::new());
    let (mut top, mut starts, mut chars) = (Vec::new(), Vec::new(), 0);
    for (token, entry) in entries {
        let text = names.of(token).into_owned();
        starts.push(chars);
        chars += names.text_chars(token);
        chosen.push(entry.map(|e| e.logprob.max(FLOOR)));
        top.push(entry.map(|e| {
            let mut map = Map::new();
            map.insert(text.clone(), json!(e.logprob.max(FLOOR)));
            for &(id, logprob) in &e.top_logprobs {
                map.entry(names.of(id)).or_insert(json!(logprob.max(FLOOR)));
            }
            Value::Object(map)
        }));
        tokens.push(text);
    }
    json!({"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": starts})
}

/// Builds the value of `prompt_logprobs`.
pub(super) fn prompt(names: &TokenFormatter, logprobs: ChoiceLogprobs<'_>) -> Value {
    let one = |id: Token, logprob: f32, rank: u32| {
        let logprob = logprob.max(FLOOR);
        json!({"logprob": logprob, "rank": rank, "decoded_token": names.of(id)})
    };
    let entry = |entry: &TokenLogprobs| {
        let mut map = Map::new();
        map.insert(entry.token.to_string(), one(entry.token, entry.logprob, entry.rank));
        for (rank, &(id, logprob)) in (1..).zip(&entry.top_logprobs) {
            map.entry(id.to_string()).or_insert_with(|| one(id, logprob, rank));
        }
        Value::Object(map)
    };
    std::iter::once(Value::Null).chain(logprobs.prompt.iter().map(entry)).collect()
}
