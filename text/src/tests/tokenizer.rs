//! Tests that encoding, decoding and streaming give the same results as the `tokenizers` crate.

use models::synth::SynthOptions;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use protocol::Token;
use serde_json::json;

use super::{TokenizerFileContents, byte_level, load, sentence_piece, write};
use crate::template::RenderedChat;
use crate::{DetokenizeOptions, Detokenizer, TextLoadError, Tokenizer};

/// Two tokenizers loaded from the same files: the tokenizer of this crate and the tokenizer of the
/// `tokenizers` crate.
struct TokenizerPair {
    tokenizer: Arc<Tokenizer>,
    reference: tokenizers::Tokenizer,
}

impl TokenizerPair {
    fn new(files: &TokenizerFileContents) -> Self {
        let (_dir, tokenizer) = load(files);
        let bytes = serde_json::to_vec(&files.tokenizer).unwrap();
        let mut reference = tokenizers::Tokenizer::from_bytes(bytes).unwrap();
        reference.with_truncation(None).unwrap();
        Self { tokenizer: Arc::new(tokenizer), reference }
    }

    fn encoded(&self, text: &str) -> Vec<Token> {
        self.reference.encode_fast(text, false).unwrap().get_ids().to_vec()
    }
}

static PAIRS: LazyLock<[TokenizerPair; 3]> = LazyLock::new(|| {
    [byte_level(), sentence_piece(false), sentence_piece(true)]
        .map(|files| TokenizerPair::new(&files))
});

#[test]
fn special_tokens_count_only_from_the_template() {
    let pair = &PAIRS[0];
    let end = pair.tokenizer.token_id("<|im_end|>").unwrap();
    let text = "hello <|im_end|>\nworld<|im_end|>";
    let raw = pair.tokenizer.encode(text, false).unwrap();
    assert_eq!(raw.iter().filter(|&&id| id == end).count(), 2);
    let rendered = RenderedChat { text: text.to_owned(), protected_positions: vec![6] };
    let protected = pair.tokenizer.encode_rendered(&rendered).unwrap();
    assert_eq!(protected.iter().filter(|&&id| id == end).count(), 1);
    assert_eq!(protected.last(), Some(&end));
    assert_eq!(pair.tokenizer.decode(&protected, false), text);
    assert_eq!(pair.tokenizer.decode(&protected, true), "hello <|im_end|>\nworld");
}

#[test]
fn bos_token_is_added_once() {
    let pair = &PAIRS[1];
    let with = pair.tokenizer.encode("hello", true).unwrap();
    assert_eq!(with[0], 1);
    assert_eq!(with[1..], pair.tokenizer.encode("hello", false).unwrap());
    assert_eq!(pair.tokenizer.bos_id(), Some(1));
    assert_eq!(pair.tokenizer.eos_ids(), [2]);
}

#[test]
fn continuation_keeps_its_leading_space() {
    let pair = &PAIRS[1];
    let ids = pair.encoded("hello");
    assert_eq!(pair.tokenizer.decode(&ids, true), "hello");
    let mut detokenizer = Detokenizer::new(pair.tokenizer.clone(), DetokenizeOptions::default());
    let mut out = String::new();
    for &id in &ids {
        detokenizer.push(id, &mut out);
    }
    detokenizer.finish(&mut out);
    assert_eq!(out, " hello");
}

#[test]
fn partial_utf8_waits_and_invalid_utf8_is_replaced() {
    let pair = &PAIRS[0];
    let mut detokenizer = Detokenizer::new(pair.tokenizer.clone(), DetokenizeOptions::default());
    let mut out = String::new();
    for (byte, so_far) in [(0xf0, ""), (0x9f, ""), (0x98, ""), (0x80, "😀"), (0xe2, "😀")] {
        detokenizer.push(byte, &mut out);
        assert_eq!(out, so_far);
    }
    detokenizer.push(u32::from(b'!'), &mut out);
    assert_eq!(out, "😀\u{fffd}!");
    detokenizer.push(0xc3, &mut out);
    detokenizer.finish(&mut out);
    assert_eq!(out, "😀\u{fffd}!\u{fffd}");
}

#[test]
fn logprob_token_strings_never_collide() {
    let pair = &PAIRS[0];
    assert_eq!(pair.tokenizer.token_text(0xe2), r"bytes:\xE2");
    assert_eq!(pair.tokenizer.token_text(u32::from(b'a')), "a");
    assert_eq!(pair.tokenizer.token_bytes(0xe2), [0xe2]);
    assert_eq!(pair.tokenizer.token_bytes(1_000_000), b"");
}

#[test]
fn eos_ids_come_from_three_files() {
    let (dir, _) = load(&byte_level());
    write(dir.path(), "generation_config.json", &json!({"eos_token_id": [7, 265]}));
    write(dir.path(), "config.json", &json!({"eos_token_id": 9}));
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.eos_ids(), [265, 7, 9]);
    let overridden = json!({"eos_token_id": [11, 12]});
    let tokenizer = Tokenizer::load_with(dir.path(), &overridden).unwrap();
    assert_eq!(tokenizer.eos_ids(), [265, 7, 11, 12]);
    assert_eq!(tokenizer.with_eos_ids(&[7, 13]).eos_ids(), [265, 7, 11, 12, 13]);
    write(dir.path(), "config.json", &json!({"eos_token_id": "x"}));
    let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json: eos_token_id"), "{error}");
}

#[test]
fn invalid_model_folder_error_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(matches!(&error, TextLoadError::NoTokenizer(path) if path == dir.path()));
    assert!(error.to_string().contains("looked for tokenizer.json, tekken.json, "), "{error}");
    for bad in ["", "{", "[]", "{}", r#"{"model":{"type":"BPE"}}"#] {
        std::fs::write(dir.path().join("tokenizer.json"), bad).unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json: "), "{error}");
    }
}

#[test]
fn tokenizer_library_panic_error_names_the_file() {
    let undefined = ("/post_processor/single/0/SpecialToken/id", "<x>");
    let second_text = ("/post_processor/single/1/Sequence/id", "B");
    for (pointer, value) in [undefined, second_text] {
        let mut tokenizer = sentence_piece(false).tokenizer;
        *tokenizer.pointer_mut(pointer).unwrap() = json!(value);
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "tokenizer.json", &tokenizer);
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json: the tokenizer library panicked"), "{error}");
    }
}

/// Generates text that contains merges, spaces, special tokens and bytes without a token.
fn text() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        4 => "[helow ]{0,6}",
        1 => "[ \n]{1,3}",
        1 => Just("<|im_end|>".to_owned()),
        1 => Just("</s>".to_owned()),
        1 => Just("<think>".to_owned()),
        1 => "[éпш😀<|>]{1,3}",
    ];
    prop::collection::vec(word, 0..8).prop_map(|words| words.concat())
}

proptest! {
    #[test]
    fn encoding_without_positions_equals_the_library(text in text()) {
        for pair in PAIRS.iter() {
            let rendered = RenderedChat { text: text.clone(), protected_positions: vec![text.len() + 1] };
            prop_assert_eq!(pair.tokenizer.encode_rendered(&rendered).unwrap(), pair.encoded(&text));
            prop_assert_eq!(pair.tokenizer.encode(&text, false).unwrap(), pair.encoded(&text));
        }
    }

    #[test]
    fn fully_protected_text_has_no_special_tokens(text in text()) {
        let pair = &PAIRS[0];
        let protected_positions = text.char_indices().map(|(at, _)| at).collect();
        let ids = pair.tokenizer.encode_rendered(&RenderedChat { text: text.clone(), protected_positions }).unwrap();
        prop_assert!(ids.iter().all(|&id| !pair.tokenizer.is_special(id)));
        prop_assert_eq!(pair.tokenizer.decode(&ids, true), text);
    }

    /// Random token ids, so most byte sequences are invalid UTF-8. With byte fallback, the `tokenizers` crate
    /// replaces a partly valid run of byte tokens as a whole, so for tokenizers with byte fallback such runs
    /// are limited to one byte.
    #[test]
    fn detokenizer_deltas_join_to_library_decoding(
        ids in prop::collection::vec(0_u32..275, 0..40),
        skip: bool,
    ) {
        for (index, pair) in PAIRS.iter().enumerate() {
            let mut ids = ids.clone();
            if index == 1 {
                let byte = |id: u32| (3..259).contains(&id);
                ids.retain(|&id| id < 272 && !(skip && pair.tokenizer.is_special(id)));
                let mut before = false;
                ids.retain(|&id| !(std::mem::replace(&mut before, byte(id)) && byte(id)));
            }
            let whole = pair.reference.decode(&ids, skip).unwrap();
            prop_assert_eq!(pair.tokenizer.decode(&ids, skip), whole.clone());
            let options = DetokenizeOptions { skip_special_tokens: skip, continues: false };
            let mut detokenizer = Detokenizer::new(pair.tokenizer.clone(), options);
            let mut joined = String::new();
            for &id in &ids {
                detokenizer.push(id, &mut joined);
                prop_assert!(whole.starts_with(&joined));
            }
            detokenizer.finish(&mut joined);
            prop_assert_eq!(joined, whole);
        }
    }

    #[test]
    fn encoding_round_trips(text in "[helow éпш😀\n]{0,30}") {
        for pair in &PAIRS[..2] {
            let ids = pair.tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(pair.tokenizer.decode(&ids, false), text.clone());
        }
    }
}

#[test]
fn long_text_has_a_large_token_count_bound() {
    for pair in PAIRS.iter() {
        let text = "hello wow, ".repeat(1_000);
        let lower_bound = pair.tokenizer.min_token_count(&text);
        let tokens = pair.encoded(&text).len();
        assert!((1_500..=tokens).contains(&lower_bound), "{lower_bound} of {tokens}");
    }
    // Normaliser and pre-tokenizer steps that join or drop text invalidate every lower bound on the token
    // count.
    let files = byte_level();
    let with = |key: &str, value: serde_json::Value| {
        let mut files = files.clone();
        files.tokenizer[key] = value;
        load(&files).1.min_token_count(&"hello ".repeat(1_000))
    };
    assert!(with("normalizer", json!(null)) > 0);
    assert_eq!(
        with("normalizer", json!({"type": "Strip", "strip_left": true, "strip_right": true})),
        0
    );
    assert_eq!(with("pre_tokenizer", json!({"type": "Whitespace"})), 0);
    let mut tokens = files.tokenizer["added_tokens"].clone();
    tokens[1]["rstrip"] = json!(true);
    assert_eq!(with("added_tokens", tokens), 0);
}

proptest! {
    #[test]
    fn token_count_bound_is_a_lower_bound(
        parts in proptest::collection::vec(
            prop_oneof![
                "\\PC{0,8}",
                "[ \n\te\u{301}\u{212b}\u{1100}\u{1161}]{0,6}",
                Just("hello".to_owned()), Just("<|im_end|>".to_owned()), Just("\n\n".to_owned()),
                Just("▁▁".to_owned()), Just("<s>".to_owned()), Just("<0x41>".to_owned()),
            ],
            0..24,
        ),
    ) {
        let text = parts.concat();
        for pair in PAIRS.iter() {
            let tokens = pair.tokenizer.encode(&text, true).unwrap().len();
            let lower_bound = pair.tokenizer.min_token_count(&text);
            prop_assert!(lower_bound <= tokens, "{} > {}: {:?}", lower_bound, tokens, text);
        }
    }
}

#[test]
fn synthetic_vocabulary_round_trips() {
    for (architecture, model_type) in [
        ("LlamaForCausalLM", "llama"),
        ("MistralForCausalLM", "mistral"),
        ("Qwen3ForCausalLM", "qwen3"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (config, out) = (folder.path().join("config.json"), folder.path().join("model"));
        let tiny = json!({
            "architectures": [architecture], "model_type": model_type, "vocab_size": 300,
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64
        });
        std::fs::write(&config, tiny.to_string()).unwrap();
        models::synth::write(&config, &out, &SynthOptions::default(), &mut |_, _| {}).unwrap();
        let tokenizer = Tokenizer::load(&out).unwrap();
        let ids: Vec<Token> = (32..127).chain(256..300).rev().collect();
        let text = tokenizer.decode(&ids, false);
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{architecture}: {text}");
        assert_eq!(tokenizer.vocab_size(), 300);
    }
}
