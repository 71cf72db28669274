//! Flags of speculative decoding: `--speculative-config JSON` with the keys of vLLM, or two equivalent flags.

use clap::{Args, ValueEnum};
use executor::MTP_DRAFTS_MAX;
use protocol::{DraftAcceptanceRule, SpeculativeConfig, SpeculativeMethod};
use serde::Deserialize;

use super::{CommandLineError, rejected};

/// Names of the speculative methods (proposers) in flags and JSON.
const NGRAM: &str = "ngram";
const MTP: &str = "mtp";
const DRAFT_MODEL: &str = "draft_model";
const EAGLE3: &str = "eagle3";
/// Value of `rejection_sample_method`: draft tokens are verified, so outputs equal those without draft
/// tokens.
const STRICT: &str = "strict";
/// vLLM's name of `STRICT`.
const STANDARD: &str = "standard";
/// Value of `rejection_sample_method`: draft tokens are accepted at random, for benchmarks.
const SYNTHETIC: &str = "synthetic";
/// Key with the probability that a draft token is accepted.
const RATE: &str = "synthetic_acceptance_rate";
/// Key with the mean number of tokens per step.
const LENGTH: &str = "synthetic_acceptance_length";
/// Maximum number of draft tokens per row of n-gram lookup and of a draft model.
const DRAFT_TOKENS_MAX: u8 = 16;
/// Maximum length of the n-grams that n-gram (prompt lookup) speculation matches.
const PROMPT_LOOKUP_LIMIT: u8 = 64;
/// Default length of the n-grams that n-gram (prompt lookup) speculation matches.
const PROMPT_LOOKUP_DEFAULT: u8 = 5;
/// Default number of draft tokens per row.
const DRAFT_TOKENS_DEFAULT: u8 = 1;

/// Flags of speculative decoding.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Speculation")]
pub struct SpeculationArgs {
    /// Speculative decoding, e.g. {"method": "mtp", "num_speculative_tokens": 1} or {"method": "ngram",
    /// "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    #[arg(long, value_parser = config, value_name = "JSON")]
    speculative_config: Option<SpeculativeConfigJson>,
    /// Speculative method: none; ngram (prompt lookup); or mtp, the model's own MTP (NextN) module. A draft
    /// model (draft_model) or an EAGLE-3 head (eagle3) is selected with --speculative-config, which names its
    /// checkpoint
    #[arg(long, alias = "method", default_value = "none")]
    spec_method: String,
    /// Statistics of draft tokens in `metrics.speculative_decoding` of replies with one choice
    #[arg(long, default_value = "none", value_name = "LEVEL")]
    per_request_spec_decode_metrics: SpecDecodeMetricsArg,
    /// Draft tokens per step [default: 1]
    #[arg(long, alias = "num-speculative-tokens", value_name = "COUNT")]
    spec_tokens: Option<u8>,
}

/// Level of detail of the statistics of draft tokens in replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecDecodeMetricsArg {
    /// No statistics
    None,
    /// Sums, rates and a histogram
    Summary,
    /// Also the counts of each step
    Detailed,
}

impl SpeculationArgs {
    /// Returns the level of detail of the statistics of draft tokens in replies.
    pub fn reply_metrics(&self) -> SpecDecodeMetricsArg {
        self.per_request_spec_decode_metrics
    }

    /// Returns the speculative decoding settings; `None` = disabled.
    pub fn speculation(&self) -> Option<SpeculativeConfig> {
        if let Some(config) = &self.speculative_config {
            return Some(config.speculation());
        }
        let config = SpeculativeConfigJson {
            method: self.spec_method.clone(),
            num_speculative_tokens: self.spec_tokens.unwrap_or(DRAFT_TOKENS_DEFAULT),
            prompt_lookup_min: None,
            prompt_lookup_max: None,
            model: None,
            rejection_sample_method: None,
            synthetic_acceptance_rate: None,
            synthetic_acceptance_length: None,
        };
        (self.spec_method != "none").then(|| config.speculation())
    }

    /// Returns the draft model, given as a folder or a hub id, if there is one.
    pub fn draft_model(&self) -> Option<&str> {
        self.speculative_config.as_ref()?.model.as_deref()
    }

    /// Returns the flag that enables speculative decoding, for error messages.
    pub fn flag_in_error(&self) -> String {
        match self.speculative_config {
            Some(_) => "--speculative-config".to_owned(),
            None => format!("--spec-method {}", self.spec_method),
        }
    }

    /// Rejects unsupported methods and conflicting flags.
    pub(super) fn check(&self) -> Result<(), CommandLineError> {
        let has_method = self.spec_method != "none";
        if self.speculative_config.is_some() && (has_method || self.spec_tokens.is_some()) {
            return rejected("--speculative-config: excludes --spec-method and --spec-tokens");
        }
        let has_metrics = self.per_request_spec_decode_metrics != SpecDecodeMetricsArg::None;
        if has_metrics && self.speculation().is_none() {
            return rejected("--per-request-spec-decode-metrics: needs --speculative-config");
        }
        if !has_method && self.spec_tokens.is_some() {
            return rejected("--spec-tokens: needs --spec-method");
        }
        let method = check_method(&self.spec_method);
        if needs_draft_checkpoint(&self.spec_method) {
            return rejected(format!(
                "--spec-method {}: use --speculative-config, which names the model",
                self.spec_method
            ));
        }
        if has_method && let Err(error) = method {
            return rejected(format!("--spec-method {error}"));
        }
        let max_tokens = draft_tokens_max(&self.spec_method);
        match self.spec_tokens {
            Some(count) if !(1..=max_tokens).contains(&count) => rejected(format!(
                "--spec-tokens {count}: 1 to {max_tokens} for {}",
                self.spec_method
            )),
            _ => Ok(()),
        }
    }
}

/// JSON value of `--speculative-config`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpeculativeConfigJson {
    method: String,
    num_speculative_tokens: u8,
    prompt_lookup_min: Option<u8>,
    prompt_lookup_max: Option<u8>,
    model: Option<String>,
    rejection_sample_method: Option<String>,
    synthetic_acceptance_rate: Option<f64>,
    synthetic_acceptance_length: Option<f64>,
}

impl SpeculativeConfigJson {
    fn speculation(&self) -> SpeculativeConfig {
        let (min, max) = self.prompt_lookup_range();
        let method = match self.method.as_str() {
            MTP => SpeculativeMethod::Mtp,
            DRAFT_MODEL => SpeculativeMethod::DraftModel,
            EAGLE3 => SpeculativeMethod::Eagle3,
            _ => SpeculativeMethod::Ngram { lookup_min: min, lookup_max: max },
        };
        SpeculativeConfig {
            draft_tokens: self.num_speculative_tokens,
            method,
            acceptance: self.acceptance(),
        }
    }

    /// Returns how draft tokens are accepted: at random if a synthetic acceptance rate or length is given,
    /// else by verification.
    ///
    /// A length is the mean number of tokens per step, including the token that the model samples itself. As
    /// in vLLM, it is reached with minimum variance: with length 3.78, two draft tokens are always accepted,
    /// a third with probability 0.78, and no others.
    fn acceptance(&self) -> DraftAcceptanceRule {
        let per_mille = |mean: f64| (mean * 1000.0).round() as u16;
        match (self.synthetic_acceptance_rate, self.synthetic_acceptance_length) {
            (Some(rate), _) => {
                DraftAcceptanceRule::Synthetic { per_mille: per_mille(rate), decrease: 0 }
            }
            (None, Some(length)) => DraftAcceptanceRule::Synthetic {
                per_mille: per_mille(length - 1.0),
                decrease: 1000,
            },
            (None, None) => DraftAcceptanceRule::Exact,
        }
    }

    /// Rejects a synthetic acceptance rate or length without `rejection_sample_method` `synthetic`, and
    /// rejects `synthetic` unless exactly one of the two is given.
    fn check_acceptance(&self) -> Result<(), String> {
        let (rate, length) = (self.synthetic_acceptance_rate, self.synthetic_acceptance_length);
        match self.rejection_sample_method.as_deref() {
            None | Some(STRICT | STANDARD) => match (rate, length) {
                (None, None) => Ok(()),
                (Some(_), _) => Err(format!("{RATE}: needs rejection_sample_method {SYNTHETIC}")),
                (None, Some(_)) => {
                    Err(format!("{LENGTH}: needs rejection_sample_method {SYNTHETIC}"))
                }
            },
            Some(SYNTHETIC) => self.check_synthetic_acceptance(),
            Some(other) => {
                Err(format!("rejection_sample_method {other}: {STANDARD}, {STRICT} or {SYNTHETIC}"))
            }
        }
    }

    fn check_synthetic_acceptance(&self) -> Result<(), String> {
        let longest = f64::from(self.num_speculative_tokens) + 1.0;
        match (self.synthetic_acceptance_rate, self.synthetic_acceptance_length) {
            (Some(rate), None) if (0.0..=1.0).contains(&rate) => Ok(()),
            (Some(rate), None) => Err(format!("{RATE} {rate}: 0 to 1")),
            (None, Some(length)) if (1.0..=longest).contains(&length) => Ok(()),
            (None, Some(length)) => Err(format!(
                "{LENGTH} {length}: 1 to {longest} for {} draft tokens",
                self.num_speculative_tokens
            )),
            (None, None) => {
                Err(format!("rejection_sample_method {SYNTHETIC} needs {RATE} or {LENGTH}"))
            }
            (Some(_), Some(_)) => Err(format!("{RATE} excludes {LENGTH}")),
        }
    }

    /// Returns the minimum and maximum n-gram length. As in vLLM, if only one of the two is given, the other
    /// one is equal to it.
    fn prompt_lookup_range(&self) -> (u8, u8) {
        let max =
            self.prompt_lookup_max.or(self.prompt_lookup_min).unwrap_or(PROMPT_LOOKUP_DEFAULT);
        (self.prompt_lookup_min.unwrap_or(max), max)
    }

    fn check(&self) -> Result<(), String> {
        check_method(&self.method).map_err(|error| format!("method {error}"))?;
        let (count, max_tokens) = (self.num_speculative_tokens, draft_tokens_max(&self.method));
        if !(1..=max_tokens).contains(&count) {
            return Err(format!(
                "num_speculative_tokens {count}: 1 to {max_tokens} for {}",
                self.method
            ));
        }
        self.check_acceptance()?;
        if needs_draft_checkpoint(&self.method) != self.model.is_some() {
            return Err(format!("model: required for methods {DRAFT_MODEL} and {EAGLE3} only"));
        }
        if self.method != NGRAM {
            if self.prompt_lookup_min.or(self.prompt_lookup_max).is_some() {
                return Err("prompt_lookup_min, prompt_lookup_max: method ngram only".to_owned());
            }
            return Ok(());
        }
        let (min, max) = self.prompt_lookup_range();
        if min == 0 || min > max || max > PROMPT_LOOKUP_LIMIT {
            return Err(format!(
                "prompt_lookup_min {min}, prompt_lookup_max {max}: 1 to {PROMPT_LOOKUP_LIMIT}, min at most max"
            ));
        }
        Ok(())
    }
}

fn check_method(method: &str) -> Result<(), String> {
    if [NGRAM, MTP, DRAFT_MODEL, EAGLE3].contains(&method) {
        return Ok(());
    }
    Err(format!("{method}: supported methods are {NGRAM}, {MTP}, {DRAFT_MODEL} and {EAGLE3}"))
}

/// Whether the method needs the checkpoint of a draft model.
fn needs_draft_checkpoint(method: &str) -> bool {
    [DRAFT_MODEL, EAGLE3].contains(&method)
}

/// Returns the maximum number of draft tokens per row for a method.
fn draft_tokens_max(method: &str) -> u8 {
    if [MTP, EAGLE3].contains(&method) { MTP_DRAFTS_MAX } else { DRAFT_TOKENS_MAX }
}

/// Parses the value of `--speculative-config`. The error message names the keys that are unknown.
fn config(text: &str) -> Result<SpeculativeConfigJson, String> {
    let object = super::units::json_object(text)?;
    let config: SpeculativeConfigJson =
        serde_json::from_value(object.into()).map_err(|error| error.to_string())?;
    config.check()?;
    Ok(config)
}

#[cfg(test)]
mod tests;
