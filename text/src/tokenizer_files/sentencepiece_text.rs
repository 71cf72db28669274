//! Converts the white space handling of a SentencePiece model to the format of `tokenizer.json`.
//!
//! If `legacy` in `tokenizer_config.json` is true (the default), each text between two special tokens is
//! encoded like a separate text, with a space prepended. Otherwise a space is prepended only to the whole
//! text.

use super::ConversionContext;
use super::sentencepiece_model::NormalizerSpec;
use base64::Engine as _;
use serde_json::{Value, json};

/// Normaliser and pre-tokenizer before the model, and decoder after it.
pub(super) struct SentencePieceStages {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) decoder: Value,
}

impl SentencePieceStages {
    pub(super) fn new(spec: &NormalizerSpec, context: &ConversionContext<'_>) -> Self {
        let prefix_space =
            spec.add_dummy_prefix() && context.flag("add_prefix_space").unwrap_or(true);
        let legacy = context.flag("legacy").unwrap_or(true);
        let mut steps = rewriting_steps(spec);
        let mut pre_tokenizer = Value::Null;
        if legacy {
            if prefix_space {
                steps.push(json!({"type": "Prepend", "prepend": "▁"}));
            }
            steps.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}));
        } else {
            let scheme = if prefix_space { "first" } else { "never" };
            pre_tokenizer = json!({"type": "Metaspace", "replacement": "▁",
                "prepend_scheme": scheme, "split": false});
        }
        let normalizer = if steps.is_empty() {
            Value::Null
        } else {
            json!({"type": "Sequence", "normalizers": steps})
        };
        Self {
            normalizer,
            pre_tokenizer,
            decoder: json!({"type": "Sequence", "decoders": decoders(prefix_space)}),
        }
    }
}

/// Returns the normaliser steps that replace characters and remove spaces.
fn rewriting_steps(spec: &NormalizerSpec) -> Vec<Value> {
    let mut steps = Vec::new();
    let characters = spec.precompiled_charsmap();
    if !characters.is_empty() {
        let base64 = base64::engine::general_purpose::STANDARD.encode(characters);
        steps.push(json!({"type": "Precompiled", "precompiled_charsmap": base64}));
    }
    if spec.remove_extra_whitespaces() {
        let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": content});
        steps.push(replace(r"\A +", ""));
        // The lookbehind keeps the search linear: no match begins inside a run of spaces.
        steps.push(replace(r"(?<![ ▁])[ ▁]++\z", ""));
        steps.push(replace(" {2,}", " "));
    }
    steps
}

/// Returns the steps of the decoder. With `prefix_space`, the encoder adds a space before the text.
fn decoders(prefix_space: bool) -> Vec<Value> {
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix_space {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    decoders
}
