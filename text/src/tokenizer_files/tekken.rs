//! `tekken.json` of Mistral: the special tokens, which have the lowest ids, are followed by a tiktoken
//! vocabulary.

use super::byte_level::{ByteLevelParts, split_by};
use super::ranked_vocabulary::RankedVocabulary;
use super::{ConversionContext, added_token};
use protocol::Token;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Special tokens, in id order, for files that list no special tokens.
const FIRST_SPECIAL_TOKENS: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// Maximum number of special tokens; each of them becomes an added token.
const SPECIAL_TOKENS_MAX: usize = 1 << 16;

/// Contents of `tekken.json`, without the members for images and audio, which do not affect text.
#[derive(Deserialize)]
struct TekkenFile {
    config: TekkenConfig,
    vocab: Vec<TekkenToken>,
    special_tokens: Option<Vec<TekkenSpecialToken>>,
}

/// Member `config` of `tekken.json`.
#[derive(Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: Option<usize>,
    default_num_special_tokens: Option<usize>,
}

/// Entry of `vocab`.
#[derive(Deserialize)]
struct TekkenToken {
    rank: usize,
    token_bytes: String,
}

/// Entry of `special_tokens`.
#[derive(Deserialize)]
struct TekkenSpecialToken {
    rank: usize,
    token_str: String,
}

pub(super) fn convert(
    contents: &[u8],
    context: &mut ConversionContext<'_>,
) -> Result<Value, String> {
    let file: TekkenFile = serde_json::from_slice(contents).map_err(|error| error.to_string())?;
    let special = special_tokens(file.special_tokens, file.config.default_num_special_tokens)?;
    let size = match file.config.default_vocab_size {
        Some(size) => {
            size.checked_sub(special.len()).filter(|size| *size <= file.vocab.len()).ok_or(
                "config.default_vocab_size: does not match the lengths of the lists of tokens",
            )?
        }
        None => file.vocab.len(),
    };
    let mut ranked = RankedVocabulary::default();
    for token in &file.vocab[..size] {
        ranked.push(token.rank, token.token_bytes.as_bytes())?;
    }
    for (role, token) in [
        ("bos_token", "<s>"),
        ("eos_token", "</s>"),
        ("unk_token", "<unk>"),
        ("pad_token", "<pad>"),
    ] {
        context.declared.add_default_role(role, token);
    }
    let mut vocab = ranked.vocab(special.len() as Token)?;
    for (id, token) in special.iter().enumerate() {
        if vocab.insert(token.clone(), json!(id)).is_some() {
            return Err(format!("special token {token:?} is also a token of the vocabulary"));
        }
    }
    let id_of = |text: &str| Some(special.iter().position(|token| token == text)? as Token);
    let parts = ByteLevelParts {
        post_processor: context.post_processor(true, id_of),
        added_tokens: (0..).zip(&special).map(|(id, token)| added_token(id, token, true)).collect(),
        vocab,
        merges: ranked.merges(),
        ignore_merges: true,
        normalizer: Value::Null,
        pre_tokenizer: split_by(&file.config.pattern, false),
    };
    Ok(parts.into_json())
}

/// Returns the `count` special tokens in id order.
fn special_tokens(
    listed: Option<Vec<TekkenSpecialToken>>,
    count: Option<usize>,
) -> Result<Vec<String>, String> {
    let mut tokens = match listed {
        None => FIRST_SPECIAL_TOKENS.map(str::to_owned).to_vec(),
        Some(mut listed) => {
            listed.sort_by_key(|token| token.rank);
            if listed.iter().enumerate().any(|(index, token)| token.rank != index) {
                return Err("special_tokens: ranks are not consecutive".to_owned());
            }
            listed.into_iter().map(|token| token.token_str).collect()
        }
    };
    let count = count.unwrap_or(tokens.len());
    if count < tokens.len() || count > SPECIAL_TOKENS_MAX {
        return Err(format!(
            "config.default_num_special_tokens: {count}; {} to {SPECIAL_TOKENS_MAX}",
            tokens.len()
        ));
    }
    tokens.extend((tokens.len()..count).map(|id| format!("<SPECIAL_{id}>")));
    let distinct: BTreeSet<&String> = tokens.iter().collect();
    if distinct.len() != tokens.len() {
        return Err("special_tokens: a token occurs twice".to_owned());
    }
    Ok(tokens)
}
