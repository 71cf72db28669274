//! Measurements of streamed requests, and their summary per concurrency level.
//!
//! Definitions: TTFT is the time from sending a request to its first event that contains a choice; E2E is the
//! time from sending a request to its last event that contains a choice; TPOT is `(E2E - TTFT) / (output
//! tokens - 1)`; ITL is the time between two successive events. The output rate is the number of output
//! tokens of all requests divided by the time from sending the first request to the last event of any
//! request. Percentile p of n sorted values is the value at index `floor(p * n)`, at most the last one.

use std::time::Instant;

use serde::Serialize;

/// Measurements of one successful request.
#[derive(Debug)]
pub(super) struct RequestMeasurement {
    pub(super) sent: Instant,
    pub(super) first: Instant,
    pub(super) last: Instant,
    /// Number of output tokens from the usage field of the response; without usage, the number of events.
    pub(super) output_tokens: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    /// Times between successive events, in seconds.
    pub(super) gaps: Vec<f32>,
}

/// Mean, percentiles and maximum of latencies, in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub(super) struct LatencySummary {
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

/// Results for one concurrency level.
#[derive(Debug, Clone, Serialize)]
pub(super) struct LoadLevelReport {
    pub(super) concurrency: usize,
    pub(super) request_rate: Option<f64>,
    pub(super) requests: usize,
    pub(super) errors: usize,
    pub(super) first_error: Option<String>,
    pub(super) duration_s: f64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) requests_per_s: f64,
    pub(super) output_tok_s: f64,
    pub(super) total_tok_s: f64,
    pub(super) ttft_ms: LatencySummary,
    pub(super) tpot_ms: LatencySummary,
    pub(super) itl_ms: LatencySummary,
    pub(super) e2e_ms: LatencySummary,
}

impl LatencySummary {
    /// Summarises latencies in seconds, in any order. All results are zero if `seconds` is empty.
    pub(super) fn from_seconds(mut seconds: Vec<f64>) -> Self {
        seconds.sort_unstable_by(f64::total_cmp);
        let n = seconds.len();
        let at = |p: f64| seconds.get(((p * n as f64) as usize).min(n.max(1) - 1));
        let ms = |value: Option<&f64>| value.map_or(0.0, |v| v * 1e3);
        Self {
            mean: if n == 0 { 0.0 } else { seconds.iter().sum::<f64>() / n as f64 * 1e3 },
            p50: ms(at(0.50)),
            p90: ms(at(0.90)),
            p99: ms(at(0.99)),
            max: ms(seconds.last()),
        }
    }
}

impl LoadLevelReport {
    /// Summarises the requests of one concurrency level.
    pub(super) fn new(
        concurrency: usize,
        request_rate: Option<f64>,
        samples: &[RequestMeasurement],
        errors: &[String],
    ) -> Self {
        let seconds = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64();
        let each = |f: &dyn Fn(&RequestMeasurement) -> f64| {
            LatencySummary::from_seconds(samples.iter().map(f).collect())
        };
        let sum = |f: &dyn Fn(&RequestMeasurement) -> u64| samples.iter().map(f).sum::<u64>();
        let start = samples.iter().map(|s| s.sent).min();
        let end = samples.iter().map(|s| s.last).max();
        let duration_s = start.zip(end).map_or(0.0, |(start, end)| seconds(start, end));
        let per_s = |count: u64| if duration_s > 0.0 { count as f64 / duration_s } else { 0.0 };
        let (prompt_tokens, output_tokens) = (sum(&|s| s.prompt_tokens), sum(&|s| s.output_tokens));
        // TPOT is undefined for requests with a single output token.
        let multi_token = samples.iter().filter(|s| s.output_tokens > 1);
        let tpot = multi_token.map(|s| seconds(s.first, s.last) / (s.output_tokens - 1) as f64);
        Self {
            concurrency,
            request_rate,
            requests: samples.len(),
            errors: errors.len(),
            first_error: errors.first().cloned(),
            duration_s,
            prompt_tokens,
            cached_tokens: sum(&|s| s.cached_tokens),
            output_tokens,
            requests_per_s: per_s(samples.len() as u64),
            output_tok_s: per_s(output_tokens),
            total_tok_s: per_s(prompt_tokens + output_tokens),
            ttft_ms: each(&|s| seconds(s.sent, s.first)),
            tpot_ms: LatencySummary::from_seconds(tpot.collect()),
            itl_ms: LatencySummary::from_seconds(
                samples.iter().flat_map(|s| s.gaps.iter().map(|&g| f64::from(g))).collect(),
            ),
            e2e_ms: each(&|s| seconds(s.sent, s.last)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn latency_metrics_follow_their_definitions() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let sample = |sent, first, last, tokens| RequestMeasurement {
            sent: at(sent),
            first: at(first),
            last: at(last),
            output_tokens: tokens,
            prompt_tokens: 10,
            cached_tokens: 4,
            gaps: vec![0.1],
        };
        let samples = [sample(0, 100, 300, 3), sample(50, 250, 1050, 5), sample(60, 70, 70, 1)];
        let level = LoadLevelReport::new(2, None, &samples, &["x".to_owned()]);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        close(level.duration_s, 1.05);
        close(level.output_tok_s, 9.0 / 1.05);
        close(level.total_tok_s, 39.0 / 1.05);
        close(level.ttft_ms.p50, 100.0);
        close(level.ttft_ms.max, 200.0);
        close(level.tpot_ms.mean, 150.0);
        close(level.e2e_ms.p99, 1000.0);
        assert_eq!((level.requests, level.errors), (3, 1));
        let none = LoadLevelReport::new(1, None, &[], &[]);
        close(none.output_tok_s, 0.0);
        close(none.ttft_ms.p99, 0.0);
    }
}
