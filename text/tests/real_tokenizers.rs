//! Encodes and decodes the lines of `tests/conformance/tokenizers` with every tokenizer in a folder, for
//! `just tokenizer-table`.

use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use text::{DetokenizeOptions, Detokenizer, TextError, Tokenizer};

/// Returns the text of `ids`, detokenized one id at a time.
fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special_tokens: bool) -> String {
    let options = DetokenizeOptions { skip_special_tokens, continues: false };
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), options);
    let mut text = String::new();
    for &id in ids {
        let mut delta = String::new();
        detokenizer.push(id, &mut delta);
        text.push_str(&delta);
    }
    detokenizer.finish(&mut text);
    text
}

/// Returns the token ids and decoded texts of `line`.
fn line_results(tokenizer: &Arc<Tokenizer>, line: &str) -> Result<Value, TextError> {
    let ids = tokenizer.encode(line, false)?;
    let with_special = tokenizer.encode(line, true)?;
    let (text, visible) = (tokenizer.decode(&ids, true), tokenizer.decode(&ids, false));
    let stream_equal =
        streamed(tokenizer, &ids, true) == text && streamed(tokenizer, &ids, false) == visible;
    let bounded = tokenizer.min_token_count(line) <= ids.len();
    Ok(json!({"ids": ids, "with_special": with_special, "text": text, "visible": visible,
        "stream_equal": stream_equal, "bounded": bounded}))
}

/// Returns the decoded texts of a sequence of arbitrary tokens, given by `fractions`: token ids divided by
/// the vocabulary size.
fn sequence_results(tokenizer: &Arc<Tokenizer>, fractions: &[f64]) -> Value {
    let id = |fraction: &f64| (fraction * tokenizer.vocab_size() as f64) as u32;
    let ids: Vec<u32> = fractions.iter().map(id).collect();
    let text = tokenizer.decode(&ids, true);
    let stream_equal = streamed(tokenizer, &ids, true) == text;
    json!({"ids": ids, "text": text, "stream_equal": stream_equal})
}

/// Texts to encode and token sequences to decode with every tokenizer.
#[derive(Deserialize)]
struct ComparisonTexts {
    lines: Vec<String>,
    sequences: Vec<Vec<f64>>,
}

/// Returns the results for all texts, or the error of loading the tokenizer.
fn results(folder: &Path, texts: &ComparisonTexts) -> Result<Value, TextError> {
    let tokenizer = match Tokenizer::load(folder) {
        Ok(tokenizer) => Arc::new(tokenizer),
        Err(error) => return Ok(json!({"error": error.to_string()})),
    };
    let lines: Result<Vec<Value>, TextError> =
        texts.lines.iter().map(|line| line_results(&tokenizer, line)).collect();
    let sequences: Vec<Value> =
        texts.sequences.iter().map(|ids| sequence_results(&tokenizer, ids)).collect();
    Ok(json!({"vocab_size": tokenizer.vocab_size(), "eos_ids": tokenizer.eos_ids(),
        "special_tokens": tokenizer.special_tokens(), "lines": lines?, "sequences": sequences}))
}

#[test]
#[ignore = "needs downloaded tokenizers: `just tokenizer-table`"]
#[expect(clippy::disallowed_methods, reason = "the folder comes from `just`")]
fn real_tokenizers_encode_and_decode_lines() {
    let root = PathBuf::from(std::env::var_os("HADRON_TOKENIZERS").unwrap());
    let texts = std::fs::read(root.join("texts.json")).unwrap();
    let texts: ComparisonTexts = serde_json::from_slice(&texts).unwrap();
    for entry in std::fs::read_dir(root.join("folders")).unwrap() {
        let folder = entry.unwrap().path();
        let results = results(&folder, &texts).unwrap();
        std::fs::write(folder.join("hadron.json"), results.to_string()).unwrap();
    }
}
