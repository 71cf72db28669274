//! Writes a byte-level tokenizer with a few hundred token ids, and a chat template.

#![allow(dead_code, reason = "each test binary uses a part")]

use serde_json::{Value, json};
use std::path::Path;

/// Vocabulary size of the tokenizer.
pub(crate) const VOCAB: u32 = 320;
/// Id of the end-of-sequence token `<|im_end|>`.
pub(crate) const EOS: u32 = VOCAB - 1;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Bytes for which the tokenizer has a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenizerAlphabet {
    /// All bytes: any text has tokens, and a single token may be invalid UTF-8.
    Bytes,
    /// Printable ASCII characters only: every token is valid UTF-8 text.
    Ascii,
    /// All bytes, pairs of upper-case letters, and the markers of the harmony format as special tokens;
    /// `<|call|>` and `<|return|>` end the output, as in gpt-oss.
    Harmony,
}

/// Markers of the harmony format. Their ids, from `FIRST_MARKER` on, precede `<|im_start|>`.
const MARKERS: [&str; 7] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];
/// Id of the first marker of the harmony format.
const FIRST_MARKER: u32 = VOCAB - 2 - MARKERS.len() as u32;

/// Writes `tokenizer.json` and `tokenizer_config.json` into a folder.
pub(crate) fn write(dir: &Path, alphabet: TokenizerAlphabet) {
    let mut vocab = serde_json::Map::new();
    let bytes = match alphabet {
        TokenizerAlphabet::Bytes | TokenizerAlphabet::Harmony => 0..=255_u8,
        TokenizerAlphabet::Ascii => b' '..=b'~',
    };
    for byte in bytes {
        vocab.insert(letter(byte).to_string(), json!(vocab.len()));
    }
    let (markers, letters) = match alphabet {
        TokenizerAlphabet::Harmony => (&MARKERS[..], 'A'..='Z'),
        TokenizerAlphabet::Bytes | TokenizerAlphabet::Ascii => (&[][..], 'a'..='z'),
    };
    let mut merges = Vec::new();
    'all: for first in letters.clone() {
        for second in letters.clone() {
            if vocab.len() + markers.len() == VOCAB as usize - 2 {
                break 'all;
            }
            vocab.insert(format!("{first}{second}"), json!(vocab.len()));
            merges.push(format!("{first} {second}"));
        }
    }
    let step = |kind: &str| json!({"type": kind, "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let mut added_tokens: Vec<Value> =
        markers.iter().zip(FIRST_MARKER..).map(|(marker, id)| added(id, marker)).collect();
    added_tokens.extend([added(VOCAB - 2, "<|im_start|>"), added(EOS, "<|im_end|>")]);
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens,
        "normalizer": null,
        "pre_tokenizer": step("ByteLevel"),
        "post_processor": step("ByteLevel"),
        "decoder": step("ByteLevel"),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "byte_fallback": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges},
    });
    let config = json!({"eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE});
    let mut files = vec![("tokenizer.json", tokenizer), ("tokenizer_config.json", config)];
    if let [.., call, end] = markers {
        let ids = [call, end].map(|marker| harmony_tokens_of(marker)[0]);
        files.push(("generation_config.json", json!({"eos_token_id": ids})));
    }
    for (name, value) in files {
        std::fs::write(dir.join(name), value.to_string()).unwrap();
    }
}

/// Returns the token ids of `text`, in which markers of the harmony format are special tokens, and the
/// end-of-sequence token.
pub(crate) fn harmony_tokens_of(text: &str) -> Vec<u32> {
    let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
    while let Some(&byte) = rest.first() {
        let mut markers = MARKERS.iter().zip(FIRST_MARKER..);
        let marker = markers.find(|(marker, _)| rest.starts_with(marker.as_bytes()));
        let (id, len) = marker.map_or((u32::from(byte), 1), |(marker, id)| (id, marker.len()));
        ids.push(id);
        rest = &rest[len..];
    }
    ids.push(EOS);
    ids
}

fn added(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true})
}

/// Returns one token id per byte of `text`, and the end-of-sequence token.
pub(crate) fn bytes_of(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).chain([EOS]).collect()
}

/// Returns the character that represents a byte in a byte-level vocabulary, as in GPT-2.
fn letter(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(256 + before).unwrap()
}
