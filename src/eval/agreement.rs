//! Log-probability differences between two runs of `hadron eval logprobs` over the same tokens.

use super::logprobs::ScoredTokens;
use anyhow::{Context as _, Result, ensure};
use protocol::Token;
use serde_json::Value;
use std::path::Path;

/// Sums and maxima of the log-probability differences over all tokens of two runs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct RunLogprobDifferences {
    /// Number of compared tokens.
    pub(super) tokens: usize,
    /// Sum of the absolute differences of log-probabilities.
    delta_sum: f64,
    pub(super) delta_max: f64,
    /// Number of positions where both runs have the same most likely token id.
    top_equal: usize,
}

impl RunLogprobDifferences {
    /// Adds the differences between one line of a run and the same line of the reference run.
    ///
    /// Errors: the two lines have different tokens.
    pub(super) fn add(&mut self, line: &ScoredTokens, reference: &ScoredTokens) -> Result<()> {
        ensure!(line.tokens == reference.tokens, "the reference has different tokens");
        for (ours, theirs) in line.logprobs.iter().zip(&reference.logprobs) {
            let delta = (ours - theirs).abs();
            self.delta_sum += delta;
            self.delta_max = self.delta_max.max(delta);
        }
        self.tokens += line.logprobs.len();
        self.top_equal += line.top.iter().zip(&reference.top).filter(|(a, b)| a == b).count();
        Ok(())
    }

    /// Returns the mean of the absolute differences of log-probabilities.
    pub(super) fn delta_mean(&self) -> f64 {
        self.delta_sum / self.tokens.max(1) as f64
    }

    /// Returns the share of positions where both runs have the same most likely token id.
    pub(super) fn top_share(&self) -> f64 {
        self.top_equal as f64 / self.tokens.max(1) as f64
    }
}

/// Reads an output file of `hadron eval logprobs`.
pub(super) fn read(path: &Path) -> Result<Vec<ScoredTokens>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let lines = text.lines().enumerate().map(|(index, line)| {
        let location = || format!("{} line {}", path.display(), index + 1);
        let line: Value = serde_json::from_str(line).with_context(location)?;
        scored(&line).with_context(location)
    });
    lines.collect()
}

fn scored(line: &Value) -> Result<ScoredTokens> {
    let ids = |name: &str| -> Result<Vec<Token>> {
        serde_json::from_value(line[name].clone()).with_context(|| name.to_owned())
    };
    let logprobs: Vec<f64> =
        serde_json::from_value(line["token_logprobs"].clone()).context("token_logprobs")?;
    let scored = ScoredTokens { tokens: ids("tokens")?, top: ids("top")?, logprobs };
    let (tokens, top, logprobs) = (scored.tokens.len(), scored.top.len(), scored.logprobs.len());
    ensure!(
        top == logprobs && logprobs + 1 == tokens,
        "{tokens} tokens, but {logprobs} token_logprobs and {top} top"
    );
    Ok(scored)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(top: &[Token], logprobs: &[f64]) -> ScoredTokens {
        ScoredTokens { tokens: vec![1, 2, 3], top: top.to_vec(), logprobs: logprobs.to_vec() }
    }

    #[test]
    fn differences_are_averaged_over_tokens() {
        let mut agreement = RunLogprobDifferences::default();
        let reference = line(&[5, 6], &[-1.0, -2.0]);
        agreement.add(&line(&[5, 7], &[-1.5, -1.0]), &reference).unwrap();
        agreement.add(&reference, &reference).unwrap();
        assert_eq!(agreement.tokens, 4);
        assert_eq!(agreement.delta_mean(), 0.375);
        assert_eq!(agreement.delta_max, 1.0);
        assert_eq!(agreement.top_share(), 0.75);
        let other = ScoredTokens { tokens: vec![1, 2, 4], ..reference };
        assert!(agreement.add(&other, &line(&[5, 6], &[-1.0, -2.0])).is_err());
    }

    #[test]
    fn scored_output_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("reference.jsonl");
        let written = line(&[5, 6], &[-1.0, -2.0]);
        std::fs::write(&path, format!("{}\n", written.json(0))).unwrap();
        let [parsed] = &read(&path).unwrap()[..] else { panic!("one line") };
        assert_eq!(
            (&parsed.tokens, &parsed.top, &parsed.logprobs),
            (&written.tokens, &written.top, &written.logprobs)
        );
        std::fs::write(&path, r#"{"tokens": [1, 2], "token_logprobs": [], "top": []}"#).unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("line 1") && error.contains("0 token_logprobs"), "{error}");
    }
}
