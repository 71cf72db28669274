//! Tests against the `tokenizers` crate and against expected renderings, with small tokenizers built in this
//! module.

mod chat;
mod declared_tokens;
mod family_calls;
mod forced_calls;
mod free_calls;
mod glm_templates;
mod harmony;
mod harmony_cuts;
mod harmony_grammars;
mod output_cuts;
mod output_parsers;
mod output_properties;
mod random_output;
mod template_forms;
mod tokenizer;
mod tokenizer_files;
mod windows;

use std::path::Path;

use serde_json::{Value, json};

use super::Tokenizer;

/// Contents of the tokenizer files of a model folder.
#[derive(Debug, Clone)]
pub(super) struct TokenizerFileContents {
    /// Contents of `tokenizer.json`.
    pub(super) tokenizer: Value,
    /// Contents of `tokenizer_config.json`.
    pub(super) config: Value,
}

/// Byte-level BPE like GPT-2 and Qwen: 256 bytes, a few merges, two special tokens and one added token that
/// is not special.
pub(super) fn byte_level() -> TokenizerFileContents {
    let alphabet: Vec<char> = (0..=255_u8).map(letter).collect();
    let mut vocab = serde_json::Map::new();
    for (id, c) in alphabet.iter().enumerate() {
        vocab.insert(c.to_string(), json!(id));
    }
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ", "i m", "Ð ¿"];
    for merge in merges {
        let id = vocab.len();
        vocab.insert(merge.replace(' ', ""), json!(id));
    }
    let next = vocab.len();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [
            added(next, "<|im_start|>", true),
            added(next + 1, "<|im_end|>", true),
            added(next + 2, "<think>", false),
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex":
                r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"}},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}
        ]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
            "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
            "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "byte_fallback": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges},
    });
    let config =
        json!({"eos_token": {"content": "<|im_end|>"}, "tokenizer_class": "Qwen2Tokenizer"});
    TokenizerFileContents { tokenizer, config }
}

/// SentencePiece-style BPE like Llama 2 and Mistral: `▁` for spaces, byte fallback, a BOS token.
pub(super) fn sentence_piece(metaspace: bool) -> TokenizerFileContents {
    let mut vocab = serde_json::Map::new();
    for token in ["<unk>", "<s>", "</s>"] {
        let id = vocab.len();
        vocab.insert(token.to_owned(), json!(id));
    }
    for byte in 0..=255_u8 {
        let id = vocab.len();
        vocab.insert(format!("<0x{byte:02X}>"), json!(id));
    }
    for token in ["▁", "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", "▁hello", "▁w", "é"]
    {
        let id = vocab.len();
        vocab.insert(token.to_owned(), json!(id));
    }
    let decoder = if metaspace {
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false})
    } else {
        json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        ]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "byte_fallback": true,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "ignore_merges": false, "vocab": vocab,
            "merges": ["h e", "l l", "he ll", "hell o", "▁ hello", "▁ w"]},
    });
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": true});
    TokenizerFileContents { tokenizer, config }
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special})
}

/// Returns the character that GPT-2's byte alphabet uses for `byte`.
fn letter(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return byte as char;
    }
    let shifted = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + shifted).unwrap()
}

pub(super) fn write(dir: &Path, name: &str, json: &Value) {
    std::fs::write(dir.join(name), serde_json::to_vec(json).unwrap()).unwrap();
}

/// Writes a model folder with these tokenizer files, and loads its tokenizer.
pub(super) fn load(files: &TokenizerFileContents) -> (tempfile::TempDir, Tokenizer) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", &files.tokenizer);
    write(dir.path(), "tokenizer_config.json", &files.config);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    (dir, tokenizer)
}
