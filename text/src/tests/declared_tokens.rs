//! Tests that special tokens, BOS and EOS are determined from all tokenizer files of a folder together.

use super::{TokenizerFileContents, byte_level, write};
use crate::{TextLoadError, Tokenizer};
use protocol::Token;
use serde_json::{Value, json};

/// Files next to `tokenizer.json`, such as `tokenizer_config.json`: pairs of name and contents.
type TokenizerConfigFiles<'a> = &'a [(&'a str, Value)];

/// Loads the byte-level tokenizer with these files next to `tokenizer.json`.
fn load_with(files: TokenizerConfigFiles<'_>) -> Result<Tokenizer, TextLoadError> {
    let dir = tempfile::tempdir().unwrap();
    let TokenizerFileContents { tokenizer, .. } = byte_level();
    write(dir.path(), "tokenizer.json", &tokenizer);
    for (name, json) in files {
        write(dir.path(), name, json);
    }
    Tokenizer::load(dir.path())
}

fn specials(tokenizer: &Tokenizer) -> Vec<String> {
    let ids = 0..tokenizer.vocab_size() as Token;
    ids.filter(|id| tokenizer.is_special(*id)).filter_map(|id| tokenizer.token_string(id)).collect()
}

/// Id of `<|im_start|>`, the first added token of the byte-level tokenizer.
const START: Token = 264;

fn entry(content: &str, special: bool) -> Value {
    json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false,
        "single_word": false, "special": special})
}

#[test]
fn added_tokens_decoder_makes_tokens_special() {
    let think = (START + 2).to_string();
    let config = json!({"added_tokens_decoder": { think: entry("<think>", true) },
        "eos_token": "<|im_end|>"});
    let tokenizer = load_with(&[("tokenizer_config.json", config)]).unwrap();
    assert_eq!(specials(&tokenizer), ["<|im_start|>", "<|im_end|>", "<think>"]);
    let ids = tokenizer.encode("a<think>b", false).unwrap();
    assert!(ids.contains(&(START + 2)));
    assert_eq!(tokenizer.decode(&ids, true), "ab");
    assert!(tokenizer.special_token_strings().contains(&"<think>".to_owned()));
}

#[test]
fn special_tokens_of_tokenizer_json_stay_special() {
    let start = START.to_string();
    let config = json!({"added_tokens_decoder": { start: entry("<|im_start|>", false) }});
    let tokenizer = load_with(&[("tokenizer_config.json", config)]).unwrap();
    assert_eq!(specials(&tokenizer), ["<|im_start|>", "<|im_end|>"]);
}

#[test]
fn tokens_with_roles_and_extra_tokens_are_special() {
    let config = json!({"pad_token": "hello", "eos_token": {"content": "<|im_end|>"},
        "additional_special_tokens": ["<think>", "absent from the vocabulary"]});
    let tokenizer = load_with(&[("tokenizer_config.json", config)]).unwrap();
    assert_eq!(specials(&tokenizer), ["hello", "<|im_start|>", "<|im_end|>", "<think>"]);
    assert_eq!(tokenizer.token_id("absent from the vocabulary"), None);
    let config = json!({"extra_special_tokens": {"reasoning_token": "<think>"}});
    let tokenizer = load_with(&[("tokenizer_config.json", config)]).unwrap();
    assert_eq!(specials(&tokenizer), ["<|im_start|>", "<|im_end|>", "<think>"]);
    let role = ("reasoning_token".to_owned(), "<think>".to_owned());
    assert!(tokenizer.special_tokens().contains(&role));
}

#[test]
fn special_tokens_map_is_read_without_a_decoder() {
    let config = json!({"eos_token": "<|im_start|>"});
    let roles = json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"});
    let files =
        [("tokenizer_config.json", config.clone()), ("special_tokens_map.json", roles.clone())];
    let tokenizer = load_with(&files).unwrap();
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (Some(START), &[START + 1][..]));
    let alone = load_with(&[("special_tokens_map.json", roles.clone())]).unwrap();
    assert_eq!(alone.eos_ids(), [START + 1]);
    let mut with_decoder = config;
    with_decoder["added_tokens_decoder"] = json!({});
    let files = [("tokenizer_config.json", with_decoder), ("special_tokens_map.json", roles)];
    let tokenizer = load_with(&files).unwrap();
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (None, &[START][..]));
}

#[test]
fn added_tokens_file_extends_the_vocabulary() {
    let files = [
        ("tokenizer_config.json", json!({"pad_token": "<pad>"})),
        ("added_tokens.json", json!({"<pad>": START + 3, "<extra>": START + 4})),
    ];
    let tokenizer = load_with(&files).unwrap();
    assert_eq!(tokenizer.encode("<extra>", false).unwrap(), [START + 4]);
    assert_eq!(specials(&tokenizer), ["<|im_start|>", "<|im_end|>", "<pad>"]);
    assert_eq!(tokenizer.decode(&[START + 3, START + 4], true), "<extra>");
}

#[test]
fn different_ids_of_one_token_are_rejected() {
    let id = START.to_string();
    let config = json!({"added_tokens_decoder": { id: entry("<|im_end|>", true) }});
    let error = load_with(&[("tokenizer_config.json", config)]).unwrap_err().to_string();
    let expected =
        "tokenizer_config.json gives the token \"<|im_end|>\" id 264, tokenizer.json id 265";
    assert!(error.contains(expected), "{error}");
    let error = load_with(&[("added_tokens.json", json!({"<new>": 9000}))]).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("added_tokens.json gives the token \"<new>\" id 9000"), "{error}");
    let config = json!({"added_tokens_decoder": {"x": entry("<|im_end|>", true)}});
    let error = load_with(&[("tokenizer_config.json", config)]).unwrap_err().to_string();
    assert!(error.contains("added_tokens_decoder: \"x\" is not an id"), "{error}");
}

#[test]
fn added_tokens_must_have_their_ids() {
    let dir = tempfile::tempdir().unwrap();
    let TokenizerFileContents { mut tokenizer, .. } = byte_level();
    tokenizer["added_tokens"][0]["content"] = json!("hello");
    write(dir.path(), "tokenizer.json", &tokenizer);
    let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("added_tokens: \"hello\" has id 264, but id 259"), "{error}");
}
