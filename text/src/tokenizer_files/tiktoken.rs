//! tiktoken text files: each line contains the bytes of one token in base64, and its rank. The special tokens
//! and the pre-tokenizer pattern are not in the file; they are part of the code of the tokenizer class.

use super::byte_level::{ByteLevelParts, split_by};
use super::ranked_vocabulary::RankedVocabulary;
use super::{ConversionContext, added_token};
use crate::pre_tokenizer_patterns as patterns;
use protocol::Token;
use serde_json::{Value, json};

/// Number of ranks (tokens other than special tokens) in the tiktoken file of Llama 3.
const LLAMA3_RANKS: usize = 128_000;
/// Number of special tokens of Llama 3 and of Kimi K2.
const SPECIAL_TOKENS: usize = 256;
/// First special tokens of Llama 3; the others are reserved.
const LLAMA3_SPECIAL: [&str; 12] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
];

/// One line of a tiktoken file.
struct TiktokenLine<'a> {
    base64: &'a str,
    rank: usize,
}

/// Tokenizer families that use tiktoken files.
#[derive(Clone, Copy)]
enum TiktokenFamily {
    Llama3,
    Kimi,
    FirstQwen,
}

/// Whether `contents` is a tiktoken text file, not a SentencePiece model.
pub(super) fn is_tiktoken(contents: &[u8]) -> bool {
    let line = contents.split(|&byte| byte == b'\n').next().unwrap_or_default();
    line.is_ascii() && split_line(line).is_some()
}

pub(super) fn convert(
    contents: &[u8],
    context: &mut ConversionContext<'_>,
) -> Result<Value, String> {
    let mut ranked = RankedVocabulary::default();
    for (number, line) in (1..).zip(contents.split(|&byte| byte == b'\n')) {
        let line = line.trim_ascii();
        if !line.is_empty() {
            let parts = split_line(line);
            let TiktokenLine { base64, rank } =
                parts.ok_or_else(|| format!("line {number}: not a token and a rank"))?;
            ranked.push(rank, base64.as_bytes())?;
        }
    }
    let family = family(context, &ranked).ok_or_else(|| context.unsupported_class())?;
    let special = special_tokens(family, context, ranked.len());
    if let TiktokenFamily::Llama3 = family {
        context.declared.add_default_role("bos_token", LLAMA3_SPECIAL[0]);
        context.declared.add_default_role("eos_token", LLAMA3_SPECIAL[1]);
    }
    let id_of = |text: &str| {
        let index = special.iter().position(|token| token == text)?;
        Some((ranked.len() + index) as Token)
    };
    let (pattern, normalizer) = match family {
        TiktokenFamily::Llama3 => (patterns::LLAMA3, Value::Null),
        TiktokenFamily::Kimi => (patterns::KIMI, Value::Null),
        TiktokenFamily::FirstQwen => (patterns::QWEN2, json!({"type": "NFC"})),
    };
    let default_bos = matches!(family, TiktokenFamily::Llama3);
    let parts = ByteLevelParts {
        vocab: ranked.vocab(0)?,
        merges: ranked.merges(),
        ignore_merges: true,
        normalizer,
        pre_tokenizer: split_by(pattern, false),
        post_processor: context.post_processor(default_bos, id_of),
        added_tokens: (ranked.len() as Token..)
            .zip(&special)
            .map(|(id, content)| added_token(id, content, true))
            .collect(),
    };
    Ok(parts.into_json())
}

fn split_line(line: &[u8]) -> Option<TiktokenLine<'_>> {
    let text = std::str::from_utf8(line).ok()?;
    let (base64, rank) = text.trim_ascii().split_once(' ')?;
    Some(TiktokenLine { base64, rank: rank.parse().ok()? })
}

fn family(context: &ConversionContext<'_>, ranked: &RankedVocabulary) -> Option<TiktokenFamily> {
    match context.class.as_deref() {
        Some("TikTokenTokenizer") => Some(TiktokenFamily::Kimi),
        Some("QWenTokenizer") => Some(TiktokenFamily::FirstQwen),
        None | Some("LlamaTokenizer") if ranked.len() == LLAMA3_RANKS => {
            Some(TiktokenFamily::Llama3)
        }
        _ => None,
    }
}

/// Returns the special tokens; the first one has the id `first`. A declared token overrides the token that
/// the tokenizer class defines for the same id.
fn special_tokens(
    family: TiktokenFamily,
    context: &ConversionContext<'_>,
    first: usize,
) -> Vec<String> {
    let class_tokens: Vec<String> = match family {
        TiktokenFamily::Llama3 => {
            let reserved = |index: usize| format!("<|reserved_special_token_{}|>", index - 10);
            let named = LLAMA3_SPECIAL.into_iter().map(str::to_owned);
            named.chain((LLAMA3_SPECIAL.len()..SPECIAL_TOKENS).map(reserved)).collect()
        }
        TiktokenFamily::Kimi => {
            (first..first + SPECIAL_TOKENS).map(|id| format!("<|reserved_token_{id}|>")).collect()
        }
        TiktokenFamily::FirstQwen => {
            let named = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned);
            named.into_iter().chain((0..205).map(|extra| format!("<|extra_{extra}|>"))).collect()
        }
    };
    let declared = |id: usize| context.declared.added_token(id as Token);
    (first..)
        .zip(class_tokens)
        .map(|(id, token)| declared(id).map_or(token, |token| token.content.clone()))
        .collect()
}
