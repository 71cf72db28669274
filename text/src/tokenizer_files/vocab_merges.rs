//! `vocab.json` and `merges.txt`: the byte-level BPE format of GPT-2 and its successors.

use super::ConversionContext;
use super::byte_level::{ByteLevelParts, split_by};
use crate::pre_tokenizer_patterns as patterns;
use crate::tokenizer::read_file;
use protocol::Token;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const MERGES_FILE: &str = "merges.txt";
/// Token that these tokenizer classes use for each role, such as `bos_token`, for which no token is declared.
const END_OF_TEXT: &str = "<|endoftext|>";

pub(super) fn convert(
    contents: &[u8],
    context: &mut ConversionContext<'_>,
) -> Result<Value, String> {
    let prefix_space = context.flag("add_prefix_space").unwrap_or(false);
    let (normalizer, pre_tokenizer, roles) = match context.class.as_deref() {
        Some("Qwen2Tokenizer") => (
            json!({"type": "NFC"}),
            split_by(patterns::QWEN2, prefix_space),
            ["eos_token", "pad_token"],
        ),
        Some("Qwen3_5Tokenizer") => (
            json!({"type": "NFC"}),
            split_by(patterns::QWEN3_5, prefix_space),
            ["eos_token", "pad_token"],
        ),
        Some("GPT2Tokenizer" | "CodeGenTokenizer") => {
            let byte_level = json!({"type": "ByteLevel", "add_prefix_space": prefix_space,
                "trim_offsets": true, "use_regex": true});
            (Value::Null, byte_level, ["bos_token", "eos_token"])
        }
        _ => return Err(context.unsupported_class()),
    };
    for role in roles.into_iter().chain(["unk_token"]) {
        context.declared.add_default_role(role, END_OF_TEXT);
    }
    let vocab: BTreeMap<String, Token> =
        serde_json::from_slice(contents).map_err(|error| error.to_string())?;
    let post_processor = context.post_processor(false, |text| vocab.get(text).copied());
    let parts = ByteLevelParts {
        merges: read_merges(context, &vocab)?,
        vocab: vocab.into_iter().map(|(token, id)| (token, id.into())).collect::<Map<_, _>>(),
        ignore_merges: false,
        normalizer,
        pre_tokenizer,
        post_processor,
        added_tokens: Vec::new(),
    };
    Ok(parts.into_json())
}

/// Reads `merges.txt`: one merge per line, after an optional line `#version`.
fn read_merges(
    context: &ConversionContext<'_>,
    vocab: &BTreeMap<String, Token>,
) -> Result<Vec<Value>, String> {
    let read = read_file(&context.dir.join(MERGES_FILE)).map_err(|error| error.to_string())?;
    let bytes = read.ok_or_else(|| format!("{MERGES_FILE}, which this file needs, is missing"))?;
    let text = String::from_utf8(bytes).map_err(|_| format!("{MERGES_FILE} is not valid UTF-8"))?;
    let mut merges = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.is_empty() || line.starts_with("#version") {
            continue;
        }
        let invalid = |reason: &str| format!("{MERGES_FILE}, line {number}: {reason}");
        let (left, right) = line.split_once(' ').ok_or_else(|| invalid("not two tokens"))?;
        if ![left, right, &format!("{left}{right}")].into_iter().all(|t| vocab.contains_key(t)) {
            return Err(invalid("a token is not in the vocabulary"));
        }
        merges.push(json!([left, right]));
    }
    Ok(merges)
}
