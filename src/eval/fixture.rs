//! Reads golden fixtures (`tests/data/golden`). A fixture contains the configuration and the seed of a tiny
//! checkpoint, token ids, and the logits that Hugging Face transformers computed for these ids. The file
//! format is safetensors; only two tensors are read.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use protocol::Token;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Contents of a golden fixture for a teacher-forced comparison. Legend: T tokens, V vocabulary size.
#[derive(Debug)]
pub(super) struct EvalFixture {
    /// `config.json` of the checkpoint as text.
    pub(super) config: String,
    /// Seed of the checkpoint's synthetic weights.
    pub(super) seed: u64,
    /// Token ids, `[T]`.
    pub(super) tokens: Vec<Token>,
    /// Logits, `[T, V]`, row-major; row t predicts token t + 1.
    pub(super) logits: Vec<f32>,
    /// Vocabulary size, V.
    pub(super) vocab_size: usize,
}

/// Metadata of a golden fixture file: model configuration and seed.
#[derive(Deserialize)]
struct FixtureMetadata {
    config: String,
    #[serde(default)]
    seed: u64,
}

/// Header entry of one tensor in a safetensors file.
#[derive(Deserialize)]
struct SafetensorsEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl EvalFixture {
    /// Reads a golden fixture file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        Self::parse(&bytes).with_context(|| path.display().to_string())
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let (length, rest) = bytes.split_first_chunk().context("no header")?;
        let length = usize::try_from(u64::from_le_bytes(*length))?;
        ensure!(length <= rest.len(), "the header of {length} bytes is truncated");
        let (header, data) = rest.split_at(length);
        let header: Map<String, Value> = serde_json::from_slice(header).context("header")?;
        let golden = header.get("__metadata__").and_then(|m| m["golden"].as_str());
        let golden: FixtureMetadata =
            serde_json::from_str(golden.context("not a golden fixture")?)?;
        let (shape, tokens) = tensor(&header, data, "tokens", "I32")?;
        ensure!(shape.len() == 1, "tokens: shape {shape:?}");
        let tokens = tokens.iter().map(|&b| Token::try_from(i32::from_le_bytes(b)));
        let tokens: Vec<Token> = tokens.collect::<Result<_, _>>()?;
        let (shape, logits) = tensor(&header, data, "logits", "F32")?;
        let &[rows, vocab_size] = &shape[..] else { bail!("logits: shape {shape:?}") };
        ensure!(rows == tokens.len() && vocab_size > 0, "logits: shape {shape:?}");
        let logits = logits.iter().map(|&b| f32::from_le_bytes(b)).collect();
        Ok(Self { config: golden.config, seed: golden.seed, tokens, logits, vocab_size })
    }

    /// Returns the log-probabilities of all token ids for the token after position `at`.
    pub(super) fn logprobs(&self, at: usize) -> Vec<f64> {
        let row = &self.logits[at * self.vocab_size..][..self.vocab_size];
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        row.iter().map(|&x| f64::from(x - max) - sum.ln()).collect()
    }
}

/// Returns the shape and the 4-byte elements of one tensor.
fn tensor<'a>(
    header: &Map<String, Value>,
    data: &'a [u8],
    name: &str,
    dtype: &str,
) -> Result<(Vec<usize>, &'a [[u8; 4]])> {
    let entry = header.get(name).with_context(|| format!("no tensor {name}"))?;
    let entry: SafetensorsEntry =
        serde_json::from_value(entry.clone()).with_context(|| name.to_owned())?;
    let [from, to] = entry.data_offsets;
    let bytes = data.get(from..to).with_context(|| format!("{name}: the data exceed the file"))?;
    let (elements, rest) = bytes.as_chunks::<4>();
    let expected: Option<usize> = entry.shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
    ensure!(entry.dtype == dtype, "{name}: dtype {}, expected {dtype}", entry.dtype);
    ensure!(rest.is_empty() && expected == Some(elements.len()), "{name}: wrong size");
    Ok((entry.shape, elements))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn bytes(shape: &[usize]) -> Vec<u8> {
        let golden = json!({"config": "{}", "seed": 3}).to_string();
        let header = json!({
            "__metadata__": {"golden": golden},
            "tokens": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
            "logits": {"dtype": "F32", "shape": shape, "data_offsets": [8, 24]},
        })
        .to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        for token in [5_i32, 6] {
            bytes.extend_from_slice(&token.to_le_bytes());
        }
        for logit in [0.0_f32, 0.0, 1.0, 1.0] {
            bytes.extend_from_slice(&logit.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_fixture_is_read_and_normalised() {
        let fixture = EvalFixture::parse(&bytes(&[2, 2])).unwrap();
        assert_eq!((fixture.tokens.as_slice(), fixture.seed), ([5, 6].as_slice(), 3));
        assert!((fixture.logprobs(1)[0] + 2_f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn inconsistent_fixture_is_rejected() {
        let good = bytes(&[2, 2]);
        assert!(EvalFixture::parse(&bytes(&[2, 3])).is_err());
        assert!(EvalFixture::parse(&bytes(&[usize::MAX, 2])).is_err());
        for cut in [0, 4, 8, 20, good.len() - 1] {
            assert!(EvalFixture::parse(&good[..cut]).is_err(), "{cut}");
        }
    }
}
