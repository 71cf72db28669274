//! Metrics of the HTTP server.

use super::histogram_buckets::HistogramFamily;
use super::metric_registrar::MetricRegistrar;
use prometheus::{Error, Gauge, Histogram, IntCounter, IntCounterVec};
use std::collections::BTreeMap;
use std::time::Duration;

/// Values of the label `reason`: reasons of rejections for load or server state, as in error bodies.
const REJECTION_REASONS: [&str; 8] = [
    "grammars_overloaded",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_queued_bytes",
    "text_memory",
    "starting",
    "draining",
    "engine_unavailable",
];
/// Rejection reasons that `vllm:admission_rejections_total` counts as well.
const VLLM_REJECTION_REASONS: [&str; 2] = ["max_num_queued_reqs", "max_num_queued_tokens"];
/// Routes that have series before the first request.
const ROUTES: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Metrics of the HTTP server.
pub struct HttpMetrics {
    requests: IntCounterVec,
    open_streams: Gauge,
    ignored_fields: IntCounter,
    rejections: BTreeMap<&'static str, IntCounter>,
    vllm_rejections: BTreeMap<&'static str, IntCounter>,
    tokenize: [Histogram; 2],
    model: String,
}

impl HttpMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        let requests = f.open_counters("hadron:http_requests_total", "Responses with a sent head, by route and status code.", &["model_name", "route", "code"])?;
        for route in ROUTES {
            requests.with_label_values(&[f.model(), route, "200"]);
        }
        let ignored = f.open_counters("hadron:ignored_fields_total", "Request fields that were ignored.", &["model_name"])?;
        let rejections = f.open_counters("hadron:admission_rejections_total", "Requests rejected because of load or server state, by reason.", &["model_name", "reason"])?;
        let vllm = f.open_counters("vllm:admission_rejections_total", "Requests rejected because of load, by limit.", &["model_name", "reason"])?;
        let of = |family: &IntCounterVec, reason| (reason, family.with_label_values(&[f.model(), reason]));
        Ok(Self {
            open_streams: f.gauge("hadron:http_open_streams", "Open response streams.")?,
            ignored_fields: ignored.with_label_values(&[f.model()]),
            rejections: REJECTION_REASONS.map(|reason| of(&rejections, reason)).into(),
            vllm_rejections: VLLM_REJECTION_REASONS.map(|reason| of(&vllm, reason)).into(),
            tokenize: f.histograms("hadron:tokenize_seconds", "Time to process a request body: JSON parsing, chat template, tokenization, block hashes.", HistogramFamily::WorkSeconds, "result", ["ok", "error"])?,
            model: f.model().to_owned(),
            requests,
        })
    }

    /// Counts a response by route and status code, after the response head was sent.
    pub fn replied(&self, route: &str, code: u16) {
        self.requests.with_label_values(&[self.model.as_str(), route, &code.to_string()]).inc();
    }

    /// Counts a rejected request. Only rejections for load or server state are counted.
    pub fn rejected(&self, reason: &str) {
        for counter in
            self.rejections.get(reason).into_iter().chain(self.vllm_rejections.get(reason))
        {
            counter.inc();
        }
    }

    /// Adds `requests` that were rejected while the model was loading, before these metrics existed.
    pub fn rejected_at_startup(&self, requests: u64) {
        if let Some(counter) = self.rejections.get("starting") {
            counter.inc_by(requests);
        }
    }

    /// Adds the number of request fields that were ignored.
    pub fn ignored(&self, fields: usize) {
        self.ignored_fields.inc_by(fields as u64);
    }

    /// Records the time to parse and tokenise a request body, and whether this succeeded.
    pub fn read_body(&self, took: Duration, ok: bool) {
        self.tokenize[usize::from(!ok)].observe(took.as_secs_f64());
    }

    /// Counts an open response stream until the returned value is dropped.
    pub fn stream(&self) -> OpenStreamGuard {
        self.open_streams.inc();
        OpenStreamGuard { open: self.open_streams.clone() }
    }
}

/// Guard that counts one open response stream while it exists.
pub struct OpenStreamGuard {
    open: Gauge,
}

impl Drop for OpenStreamGuard {
    fn drop(&mut self) {
        self.open.dec();
    }
}
