//! Tests that long texts, which are tokenised window by window (in parts), give the same tokens as when
//! tokenised as a whole.

use super::{TokenizerFileContents, byte_level, load, sentence_piece};
use crate::pre_tokenizer_patterns as patterns;
use crate::template::RenderedChat;
use crate::tokenizer_windows::WINDOW_BYTES;
use crate::{TextError, Tokenizer};
use protocol::Token;
use serde_json::{Value, json};
use std::path::Path;

/// Encodes the whole text with the `tokenizers` crate.
fn expected(files: &TokenizerFileContents, text: &str) -> Vec<Token> {
    let bytes = serde_json::to_vec(&files.tokenizer).unwrap();
    let mut library = tokenizers::Tokenizer::from_bytes(bytes).unwrap();
    library.with_truncation(None).unwrap();
    library.encode_fast(text, true).unwrap().get_ids().to_vec()
}

/// Returns the byte-level tokenizer with `steps` as its pre-tokenizer.
fn with_pre_tokenizer(steps: Value) -> TokenizerFileContents {
    let mut files = byte_level();
    files.tokenizer["pre_tokenizer"] = steps;
    files
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex": pattern}})
}

fn byte_level_step(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex})
}

/// Returns one tokenizer per supported combination of normaliser and pre-tokenizer.
fn families() -> Vec<TokenizerFileContents> {
    let of = |patterns: &[&str]| {
        let mut steps: Vec<Value> = patterns.iter().map(|pattern| split(pattern)).collect();
        steps.push(byte_level_step(false));
        with_pre_tokenizer(json!({"type": "Sequence", "pretokenizers": steps}))
    };
    let mut deepseek = of(&[
        r"\p{N}{1,3}",
        patterns::DEEPSEEK_HAN_KANA,
        &patterns::DEEPSEEK_WORDS.replace(r"\r\n", "\r\n"), // The file has the characters themselves.
    ]);
    deepseek.tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": []});
    deepseek.tokenizer["added_tokens"][2]["normalized"] = json!(true);
    vec![
        byte_level(),
        with_pre_tokenizer(byte_level_step(true)),
        of(&[patterns::LLAMA3]),
        deepseek,
        of(&[patterns::TEKKEN]),
        of(&[patterns::QWEN3_5]),
        of(&[patterns::O200K]),
        of(&[patterns::KIMI]),
    ]
}

/// Pieces of random texts.
const PIECES: [&str; 16] = [
    "hello world ",
    "HELLO",
    "  \n\n ",
    "12345678",
    "don't ",
    "!?...//",
    "<|im_start|>",
    "<think>",
    "中文字符，",
    "e\u{301}",
    "\t\t",
    "Ünï",
    "// x\r\n",
    "🙂🙂",
    " ",
    "п¿",
];

/// Generates a text of `pieces` random pieces, including long runs of one character and special tokens.
fn random_text(seed: u64, pieces: usize) -> String {
    let mut state = seed;
    let mut below = |bound: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    };
    let mut text = String::new();
    for _ in 0..pieces {
        let piece = PIECES[below(PIECES.len())];
        let times = if below(400) == 0 { 1 + below(9_000) } else { 1 };
        text.push_str(&piece.repeat(times));
    }
    text
}

#[test]
fn windowed_tokens_equal_whole_text_tokens() {
    for (number, files) in (0..).zip(families()) {
        let (_dir, tokenizer) = load(&files);
        let words = "What is 12 plus 30? ".repeat(20_000);
        let tokenizer = tokenizer.with_memory(0);
        assert!(tokenizer.encode(&words, true).is_ok(), "family {number} is tokenised in windows");
        let tokenizer = tokenizer.with_memory(1 << 30);
        for seed in 0..2 {
            let text = random_text(100 * number + seed, 12_000);
            assert!(text.len() > 2 * WINDOW_BYTES);
            let encoded = tokenizer.encode(&text, true).unwrap();
            assert!(encoded == expected(&files, &text), "family {number}, seed {seed}");
        }
    }
}

#[test]
fn tokenizers_without_known_cuts_are_not_windowed() {
    for files in [sentence_piece(false), sentence_piece(true)] {
        let (_dir, tokenizer) = load(&files);
        let text = random_text(7, 4_000);
        assert!(text.len() > WINDOW_BYTES);
        assert!(tokenizer.encode(&text, true).unwrap() == expected(&files, &text));
        let error = tokenizer.with_memory(0).encode(&text, true).unwrap_err();
        assert!(matches!(error, TextError::TooMuchMemory { .. }), "{error:?}");
    }
}

#[test]
fn protected_positions_hold_in_every_window() {
    let (_dir, tokenizer) = load(&byte_level());
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    let part = format!("{}<|im_end|> ", "hello world, 12 ".repeat(600));
    let text = part.repeat(30);
    let protected_positions: Vec<usize> =
        text.match_indices("<|im_end|>").map(|(at, _)| at).step_by(2).collect();
    let rendered = RenderedChat { text: text.clone(), protected_positions };
    let ids = tokenizer.encode_rendered(&rendered).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == end).count(), 15);
    assert_eq!(tokenizer.decode(&ids, false), text);
}

#[test]
fn text_without_cuts_acquires_text_memory() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/demo");
    let limited = |bytes| Tokenizer::load(&demo).unwrap().with_memory(bytes);
    let words = "What is 12 plus 30? ".repeat(20_000);
    assert!(limited(0).encode(&words, true).is_ok(), "a window needs no share");
    let run = "x".repeat(4 * WINDOW_BYTES);
    let error = limited(10 << 20).encode(&run, true).unwrap_err();
    assert!(
        matches!(error, TextError::TooMuchMemory { text_bytes, limit, .. }
            if text_bytes > WINDOW_BYTES && limit == 10 << 20),
        "{error:?}"
    );
    assert!(limited(100 << 20).encode(&run, true).is_ok());
    assert!(limited(0).encode(&"1".repeat(4 * WINDOW_BYTES), true).is_ok(), "digits are words");
}
