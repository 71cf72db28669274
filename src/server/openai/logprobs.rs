//! Log-probabilities in the three shapes clients know: chat, text and prompt.

use crate::text::Tokenizer;
use protocol::{Token, TokenLogprobs};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

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

/// Appends the member `prompt_logprobs` to the text of an object: null for the first token, then `{"<id>": {..}}`. Written
/// as text at once, because as a value it would take ten times as much.
pub fn append_prompt(
    tokenizer: &Tokenizer,
    spelling: Spelling,
    entries: &[TokenLogprobs],
    object: &mut String,
) {
    let separator = if object.len() > 2 { "," } else { "" };
    object.pop(); // The closing brace.
    let _infallible = write!(object, "{separator}\"prompt_logprobs\":[null");
    for entry in entries {
        let others = (1..).zip(&entry.top).filter(|(_, (id, _))| *id != entry.token);
        let listed = others.map(|(rank, &(id, logprob))| (id, logprob, rank));
        object.push(',');
        let mut opening = '{';
        for (id, logprob, rank) in
            std::iter::once((entry.token, entry.logprob, entry.rank)).chain(listed)
        {
            object.push(opening);
            opening = ',';
            let (logprob, text) = (json!(logprob.max(FLOOR)), json!(spelling.of(tokenizer, id)));
            let _infallible = write!(
                object,
                "\"{id}\":{{\"logprob\":{logprob},\"rank\":{rank},\"decoded_token\":{text}}}"
            );
        }
        object.push('}');
    }
    object.push_str("]}");
}
