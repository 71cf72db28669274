//! Log-probabilities in the three shapes clients know: chat, text and prompt.

use crate::text::Tokenizer;
use protocol::{Token, TokenLogprobs};
use serde_json::{Map, Value, json};

/// Lowest value shown: JSON has no infinity.
const FLOOR: f32 = -9999.0;

/// How tokens are spelt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spelling {
    /// As text.
    Text,
    /// As `token_id:N`.
    Id,
}

impl Spelling {
    /// A token as logprobs show it.
    pub fn of(self, tokenizer: &Tokenizer, token: Token) -> String {
        match self {
            Self::Text => tokenizer.token_text(token).into_owned(),
            Self::Id => format!("token_id:{token}"),
        }
    }
}

/// The `logprobs` object of a chat choice: `{"content": [..]}`.
pub fn chat(tokenizer: &Tokenizer, spelling: Spelling, entries: &[TokenLogprobs]) -> Value {
    let one = |token: Token, logprob: f32| {
        let text = spelling.of(tokenizer, token);
        json!({
            "token": text,
            "logprob": logprob.max(FLOOR),
            "bytes": tokenizer.token_bytes(token),
        })
    };
    let entry = |entry: &TokenLogprobs| {
        let mut value = one(entry.token, entry.logprob);
        let top: Vec<Value> = entry.top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
        value["top_logprobs"] = Value::Array(top);
        value
    };
    json!({"content": entries.iter().map(entry).collect::<Vec<_>>()})
}

/// The `logprobs` object of a text choice, built over all deltas because offsets add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOffsets {
    /// Characters of the tokens shown so far.
    pub chars: usize,
}

/// The four lists of a text choice's `logprobs`. `None` = the first token of an echoed prompt.
pub fn text<'a>(
    tokenizer: &Tokenizer,
    spelling: Spelling,
    offsets: &mut TextOffsets,
    entries: impl IntoIterator<Item = (Token, Option<&'a TokenLogprobs>)>,
) -> Value {
    let (mut tokens, mut chosen) = (Vec::new(), Vec::new());
    let (mut top, mut starts) = (Vec::new(), Vec::new());
    for (token, entry) in entries {
        let text = spelling.of(tokenizer, token);
        starts.push(offsets.chars);
        offsets.chars += text.chars().count();
        chosen.push(entry.map(|e| e.logprob.max(FLOOR)));
        top.push(entry.map(|e| {
            let mut map = Map::new();
            map.insert(text.clone(), json!(e.logprob.max(FLOOR)));
            for &(id, logprob) in &e.top {
                map.entry(spelling.of(tokenizer, id)).or_insert(json!(logprob.max(FLOOR)));
            }
            Value::Object(map)
        }));
        tokens.push(text);
    }
    json!({"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": starts})
}

/// The `prompt_logprobs` list: null for the first token, then `{"<id>": {..}}`.
pub fn prompt(tokenizer: &Tokenizer, spelling: Spelling, entries: &[TokenLogprobs]) -> Value {
    let entry = |entry: &TokenLogprobs| {
        let mut map = Map::new();
        let mut put = |id: Token, logprob: f32, rank: u32| {
            let value = json!({
                "logprob": logprob.max(FLOOR),
                "rank": rank,
                "decoded_token": spelling.of(tokenizer, id),
            });
            map.entry(id.to_string()).or_insert(value);
        };
        put(entry.token, entry.logprob, entry.rank);
        for (i, &(id, logprob)) in entry.top.iter().enumerate() {
            put(id, logprob, i as u32 + 1);
        }
        Value::Object(map)
    };
    std::iter::once(Value::Null).chain(entries.iter().map(entry)).collect()
}
