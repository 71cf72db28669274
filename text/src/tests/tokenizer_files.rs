//! Tests of all kinds of tokenizer files: token ids are compared with the token ids of reference libraries
//! (`tests/conformance/tokenizers/fixtures.py`).

use super::{TokenizerFileContents, byte_level, write};
use crate::{TOKENIZER_FILES, Tokenizer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const FOLDERS: [&str; 7] =
    ["gpt2", "qwen2", "tiktoken", "kimi", "tekken", "sentencepiece_bpe", "sentencepiece_unigram"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tests/tokenizers").join(name)
}

/// Returns a copy of the fixture `name` with other values for `members` in `tokenizer_config.json`.
fn changed(name: &str, members: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = dir.path().join("tokenizer_config.json");
    let config = std::fs::read(&path).unwrap_or_else(|_| b"{}".to_vec());
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    write(dir.path(), "tokenizer_config.json", &config);
    dir
}

fn load_error(dir: &Path) -> String {
    Tokenizer::load(dir).unwrap_err().to_string()
}

#[test]
fn ids_are_those_of_the_reference_libraries() {
    for name in FOLDERS {
        let tokenizer = Tokenizer::load(&fixture(name)).unwrap();
        let expected = std::fs::read(fixture(name).join("expected.json")).unwrap();
        let expected: Vec<(String, Vec<u32>)> = serde_json::from_slice(&expected).unwrap();
        assert!(expected.len() > 80, "{name}");
        for (text, ids) in expected {
            assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{name}: {text:?}");
            assert!(tokenizer.min_token_count(&text) <= ids.len(), "{name}: {text:?}");
            // Whether the normaliser changes the text, so that decoding does not return the original text.
            let is_changed = match name {
                "sentencepiece_unigram" => true,
                "sentencepiece_bpe" => text.contains('▁'),
                "qwen2" | "tiktoken" => !text.is_ascii(),
                _ => false,
            };
            if !is_changed {
                assert_eq!(tokenizer.decode(&ids, true), text, "{name}");
            }
        }
    }
}

#[test]
fn special_tokens_of_each_file_have_their_ids() {
    let ids = |name: &str, text: &str| {
        Tokenizer::load(&fixture(name)).unwrap().encode(text, true).unwrap()
    };
    assert_eq!(ids("tiktoken", "<|endoftext|><|im_end|><|extra_204|>"), [600, 602, 807]);
    assert_eq!(ids("kimi", "[BOS]<|reserved_token_855|>"), [600, 855]);
    assert_eq!(ids("tekken", "</s>[INST]<SPECIAL_9>"), [1, 2, 3, 9]);
    assert_eq!(ids("gpt2", "<|endoftext|>"), [0]);
    assert_eq!(ids("sentencepiece_bpe", "</s>[INST]<unk>"), [1, 2, 3, 0]);
    let tekken = Tokenizer::load(&fixture("tekken")).unwrap();
    assert_eq!((tekken.bos_id(), tekken.eos_ids(), tekken.vocab_size()), (Some(1), &[2][..], 580));
    let qwen = Tokenizer::load(&fixture("qwen2")).unwrap();
    assert_eq!((qwen.bos_id(), qwen.eos_ids()), (None, &[0][..]));
}

#[test]
fn typed_control_and_byte_pieces_are_text() {
    for name in ["sentencepiece_bpe", "sentencepiece_unigram"] {
        let dir = changed(name, &json!({}));
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let newline = tokenizer.token_id("<0x0A>").unwrap();
        let ids = tokenizer.encode("a<0x0A>b", false).unwrap();
        assert!(!ids.contains(&newline), "{name}: {ids:?}");
        assert_eq!(tokenizer.decode(&ids, true), "a<0x0A>b");
    }
}

#[test]
fn long_runs_of_spaces_are_normalised_in_linear_time() {
    let tokenizer = Tokenizer::load(&fixture("sentencepiece_unigram")).unwrap();
    for space in [" ", "▁"] {
        let ids = tokenizer.encode(&format!("a{}", space.repeat(100_000)), false).unwrap();
        assert_eq!(ids, tokenizer.encode("a", false).unwrap());
        let text = format!("a{}b", space.repeat(100_000));
        assert!(!tokenizer.encode(&text, false).unwrap().is_empty());
    }
}

#[test]
fn config_members_decide_on_prefix_space_and_bos() {
    let encode = |members: Value, text: &str| {
        let dir = changed("sentencepiece_bpe", &members);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let ids = tokenizer.encode(text, true).unwrap();
        let strings: Vec<String> =
            ids.iter().filter_map(|id| tokenizer.token_string(*id)).collect();
        strings.join(" ")
    };
    assert_eq!(encode(json!({}), "the</s>the"), "<s> ▁the </s> ▁the");
    assert_eq!(encode(json!({"legacy": false}), "the</s>the"), "<s> ▁the </s> t he");
    let neither = json!({"add_prefix_space": false, "add_bos_token": false, "add_eos_token": true});
    assert_eq!(encode(neither, "the</s> the"), "t he </s> ▁the </s>");
}

#[test]
fn first_file_in_order_of_precedence_is_read() {
    let dir = changed("gpt2", &json!({}));
    let TokenizerFileContents { tokenizer, .. } = byte_level();
    assert_eq!(Tokenizer::load(dir.path()).unwrap().vocab_size(), 500);
    std::fs::copy(fixture("tekken").join("tekken.json"), dir.path().join("tekken.json")).unwrap();
    assert_eq!(Tokenizer::load(dir.path()).unwrap().vocab_size(), 580);
    write(dir.path(), "tokenizer.json", &tokenizer);
    assert_eq!(Tokenizer::load(dir.path()).unwrap().vocab_size(), 267);
}

#[test]
fn class_is_that_of_the_model_type_by_default() {
    let dir = changed("qwen2", &json!({"tokenizer_class": "PreTrainedTokenizerFast"}));
    assert!(load_error(dir.path()).contains("vocab.json: no known tokenizer_class"));
    write(dir.path(), "config.json", &json!({"model_type": "qwen3_moe"}));
    let text = "A\u{30a} 12";
    let expected = Tokenizer::load(&fixture("qwen2")).unwrap().encode(text, false).unwrap();
    assert_eq!(Tokenizer::load(dir.path()).unwrap().encode(text, false).unwrap(), expected);
}

#[test]
fn unsupported_classes_name_the_file_and_the_remedy() {
    let files = ["qwen.tiktoken", "tiktoken.model", "tokenizer.model", "vocab.json"];
    for (name, file) in ["tiktoken", "kimi", "sentencepiece_bpe", "gpt2"].into_iter().zip(files) {
        let dir = changed(name, &json!({"tokenizer_class": "OtherTokenizer"}));
        let error = load_error(dir.path());
        assert!(error.contains(&format!("{file}: tokenizer_class OtherTokenizer: ")), "{error}");
        assert!(error.contains("save_pretrained"), "{error}");
        assert!(TOKENIZER_FILES.contains(&file));
    }
}

#[test]
fn invalid_files_are_rejected_with_their_names() {
    let error_of = |name: &str, file: &str, contents: &[u8]| {
        let dir = changed(name, &json!({}));
        std::fs::write(dir.path().join(file), contents).unwrap();
        load_error(dir.path())
    };
    let cases: [(&str, &str, &[u8], &str); 9] = [
        ("gpt2", "vocab.json", b"{\"a\": -1}", "vocab.json: "),
        ("gpt2", "merges.txt", b"#version: 0.2\nt h\nzz", "merges.txt, line 3: not two tokens"),
        ("gpt2", "merges.txt", b"zz yy", "merges.txt, line 1: a token is not in the vocabulary"),
        ("tiktoken", "qwen.tiktoken", b"IQ== 0\nIg== 2\n", "rank 2 follows 1 tokens"),
        ("tiktoken", "qwen.tiktoken", b"IQ== 0\nIQ== 1\n", "the token of rank 1 occurs twice"),
        ("tiktoken", "qwen.tiktoken", b"IQ== 0\n", "byte 0x00 is not a token"),
        ("tekken", "tekken.json", b"{}", "tekken.json: missing field"),
        ("sentencepiece_bpe", "tokenizer.model", b"\xff", "not a SentencePiece model"),
        ("sentencepiece_bpe", "tokenizer.model", b"", "not a SentencePiece model: no pieces"),
    ];
    for (name, file, contents, expected) in cases {
        let error = error_of(name, file, contents);
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let dir = changed("gpt2", &json!({}));
    std::fs::remove_file(dir.path().join("merges.txt")).unwrap();
    assert!(load_error(dir.path()).contains("vocab.json: merges.txt, which this file needs"));
}
