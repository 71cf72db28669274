//! Bucket bounds of the histograms: the bounds of vLLM, unless replaced by `--custom-histogram-buckets`.

use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Families of histograms; all histograms of a family have the same bucket bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HistogramFamily {
    /// Duration of a request or of one of its phases, in seconds.
    RequestLatency,
    /// Time to the first token, in seconds.
    TimeToFirstToken,
    /// Time between output tokens, in seconds.
    InterTokenLatency,
    /// Number of tokens per step.
    IterationTokens,
    /// Number of choices (`n`) per prompt.
    ParamsN,
    /// Number of preemptions per request.
    Preemptions,
    /// Number of tokens per request, up to the maximum model length.
    Tokens,
    /// Time that a KV block is cached, in seconds.
    KvCacheResidency,
    /// Duration of a phase of a step, in seconds; not in vLLM.
    StepSeconds,
    /// Number of rows per step; not in vLLM.
    StepRows,
    /// Duration of text or grammar processing, in seconds; not in vLLM.
    WorkSeconds,
}

const REQUEST_LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const TIME_TO_FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// The first seven bounds are additions to vLLM's bounds, because small models on fast devices stay below
/// vLLM's first bound.
const INTER_TOKEN_LATENCY: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const ITERATION_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const PARAMS_N: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const PREEMPTIONS: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];
const KV_CACHE_RESIDENCY: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1200.0, 1800.0,
];
const STEP_SECONDS: &[f64] = &[
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1,
    0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];
const STEP_ROWS: &[f64] = &[
    0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0,
];
const WORK_SECONDS: &[f64] = &[
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0,
];

impl HistogramFamily {
    /// Histogram families with the names that vLLM's option uses for them.
    const NAMED: &[(&str, Self)] = &[
        ("request_latency", Self::RequestLatency),
        ("time_to_first_token", Self::TimeToFirstToken),
        ("inter_token_latency", Self::InterTokenLatency),
        ("iteration_tokens", Self::IterationTokens),
        ("request_params_n", Self::ParamsN),
        ("request_num_preemptions", Self::Preemptions),
        ("request_tokens", Self::Tokens),
        ("kv_cache_residency", Self::KvCacheResidency),
    ];

    fn name(self) -> Option<&'static str> {
        Self::NAMED.iter().find(|(_, family)| *family == self).map(|(name, _)| *name)
    }
}

/// Custom bucket bounds by the name of the histogram family (`--custom-histogram-buckets`).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CustomBuckets {
    of: BTreeMap<String, Vec<f64>>,
}

/// Reason why custom bucket bounds are rejected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CustomBucketsError {
    /// The text is not a JSON object of lists of numbers.
    #[error("not a JSON object of number lists: {0}")]
    Json(String),
    /// The text names an unknown histogram family.
    #[error("unknown bucket family {family:?}; valid families: {}", known_families())]
    Unknown {
        /// Name in the text that is no histogram family.
        family: String,
    },
    /// The list of bucket bounds of a histogram family is empty.
    #[error("{family}: at least one bound")]
    Empty {
        /// Name of the family.
        family: String,
    },
    /// A bound is not finite, not above 0, or not above the previous one.
    #[error("{family}: bounds must be finite, above 0 and strictly increasing; {bound} is not")]
    Bound {
        /// Name of the family.
        family: String,
        /// First invalid bound.
        bound: f64,
    },
}

fn known_families() -> String {
    let names: Vec<&str> = HistogramFamily::NAMED.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}

impl std::str::FromStr for CustomBuckets {
    type Err = CustomBucketsError;

    /// Parses vLLM's JSON format: an object from family name to upper bounds.
    fn from_str(text: &str) -> Result<Self, CustomBucketsError> {
        let json: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| CustomBucketsError::Json(e.to_string()))?;
        let mut of = BTreeMap::new();
        for (family, bounds) in json {
            if !HistogramFamily::NAMED.iter().any(|(name, _)| *name == family) {
                return Err(CustomBucketsError::Unknown { family });
            }
            let bounds: Vec<f64> = serde_json::from_value(bounds)
                .map_err(|e| CustomBucketsError::Json(format!("{family}: {e}")))?;
            check(&family, &bounds)?;
            of.insert(family, bounds);
        }
        Ok(Self { of })
    }
}

fn check(family: &str, bounds: &[f64]) -> Result<(), CustomBucketsError> {
    let family = family.to_owned();
    if bounds.is_empty() {
        return Err(CustomBucketsError::Empty { family });
    }
    let mut last = 0.0;
    for &bound in bounds {
        if !bound.is_finite() || bound <= last {
            return Err(CustomBucketsError::Bound { family, bound });
        }
        last = bound;
    }
    Ok(())
}

/// Effective bucket bounds of the histogram families: the custom bounds of a family if there are any,
/// otherwise its default bounds.
pub(super) struct HistogramBuckets<'a> {
    custom: &'a CustomBuckets,
    max_model_len: u32,
}

impl<'a> HistogramBuckets<'a> {
    pub(super) fn new(custom: &'a CustomBuckets, max_model_len: u32) -> Self {
        Self { custom, max_model_len }
    }

    pub(super) fn of(&self, family: HistogramFamily) -> Vec<f64> {
        if let Some(bounds) = family.name().and_then(|name| self.custom.of.get(name)) {
            return bounds.clone();
        }
        let fixed = match family {
            HistogramFamily::RequestLatency => REQUEST_LATENCY,
            HistogramFamily::TimeToFirstToken => TIME_TO_FIRST_TOKEN,
            HistogramFamily::InterTokenLatency => INTER_TOKEN_LATENCY,
            HistogramFamily::IterationTokens => ITERATION_TOKENS,
            HistogramFamily::ParamsN => PARAMS_N,
            HistogramFamily::Preemptions => PREEMPTIONS,
            HistogramFamily::KvCacheResidency => KV_CACHE_RESIDENCY,
            HistogramFamily::StepSeconds => STEP_SECONDS,
            HistogramFamily::StepRows => STEP_ROWS,
            HistogramFamily::WorkSeconds => WORK_SECONDS,
            HistogramFamily::Tokens => return one_two_five_series(self.max_model_len),
        };
        fixed.to_vec()
    }
}

/// Returns the bucket bounds 1, 2, 5, 10, 20, ... up to `max`.
fn one_two_five_series(max: u32) -> Vec<f64> {
    let decades = std::iter::successors(Some(1_u64), |decade| Some(decade * 10));
    let bounds = decades.flat_map(|decade| [1, 2, 5].map(|mantissa| mantissa * decade));
    bounds.take_while(|bound| *bound <= u64::from(max.max(1))).map(|bound| bound as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_bounds_end_at_the_longest_request() {
        assert_eq!(one_two_five_series(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(one_two_five_series(99).last(), Some(&50.0));
        assert_eq!(one_two_five_series(0), [1.0]);
    }

    #[test]
    fn custom_bounds_replace_a_family_and_wrong_ones_are_named() {
        let custom: CustomBuckets = r#"{"request_latency": [0.01, 2]}"#.parse().unwrap();
        let buckets = HistogramBuckets::new(&custom, 64);
        assert_eq!(buckets.of(HistogramFamily::RequestLatency), [0.01, 2.0]);
        assert_eq!(buckets.of(HistogramFamily::ParamsN), PARAMS_N);
        for (text, expected) in [
            ("[]", "not a JSON object"),
            (r#"{"request_latency": [true]}"#, "request_latency"),
            (r#"{"nope": [1]}"#, "unknown bucket family \"nope\""),
            (r#"{"kv_cache_residency": [1, 1]}"#, "kv_cache_residency"),
            (r#"{"request_params_n": []}"#, "request_params_n: at least one"),
            (r#"{"request_params_n": [0]}"#, "0 is not"),
            (r#"{"request_params_n": [2, 2]}"#, "2 is not"),
        ] {
            let error = text.parse::<CustomBuckets>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
