//! Post-processor that adds BOS and EOS around a text.

use super::ConversionContext;
use protocol::Token;
use serde_json::{Value, json};

/// A BOS or EOS token that the post-processor adds.
#[derive(Clone, Copy)]
pub(super) struct BosOrEosToken<'a> {
    pub(super) text: &'a str,
    pub(super) id: Token,
}

/// Returns the `post_processor` that adds `bos` before a text and `eos` after it; null if neither is added.
pub(super) fn post_processor(
    bos: Option<BosOrEosToken<'_>>,
    eos: Option<BosOrEosToken<'_>>,
) -> Value {
    let mut special = serde_json::Map::new();
    let mut piece = |token: &Option<BosOrEosToken<'_>>| {
        let token = token.as_ref()?;
        let BosOrEosToken { text, id } = token;
        special.insert((*text).to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
        Some(json!({"SpecialToken": {"id": text, "type_id": 0}}))
    };
    let (before, after) = (piece(&bos), piece(&eos));
    if special.is_empty() {
        return Value::Null;
    }
    let sequence = |id: &str| Some(json!({"Sequence": {"id": id, "type_id": 0}}));
    let join = |parts: [Option<Value>; 3]| Value::Array(parts.into_iter().flatten().collect());
    let single = join([before.clone(), sequence("A"), after.clone()]);
    let second = join([before, sequence("B"), after]);
    let pair: Vec<Value> =
        [&single, &second].into_iter().filter_map(Value::as_array).flatten().cloned().collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special})
}

impl ConversionContext<'_> {
    /// Returns the post-processor that `add_bos_token` and `add_eos_token` of `tokenizer_config.json` define.
    /// `id_of` returns the id of a token. If `add_bos_token` is absent, `default_bos` determines whether BOS
    /// is added.
    pub(super) fn post_processor(
        &self,
        default_bos: bool,
        id_of: impl Fn(&str) -> Option<Token>,
    ) -> Value {
        let token = |role: &str, added: bool| {
            let text = self.declared.role(role).filter(|_| added)?;
            Some(BosOrEosToken { text, id: id_of(text)? })
        };
        let bos = token("bos_token", self.flag("add_bos_token").unwrap_or(default_bos));
        let eos = token("eos_token", self.flag("add_eos_token").unwrap_or(false));
        post_processor(bos, eos)
    }
}
