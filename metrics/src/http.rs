//! Figures of the HTTP server.

use super::histogram_buckets::HistogramFamily;
use super::metric_registrar::MetricRegistrar;
use prometheus::{Error, Gauge, Histogram, IntCounter, IntCounterVec};
use std::collections::BTreeMap;
use std::time::Duration;

/// Slugs of refusals for load or state, as error bodies carry them.
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
/// Of these, what vLLM counts too.
const VLLM_REJECTION_REASONS: [&str; 2] = ["max_num_queued_reqs", "max_num_queued_tokens"];
/// Routes whose series exist before anybody asked for them.
const ROUTES: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Series of the HTTP server.
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
    #[rustfmt::skip] // A table.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        let requests = f.open_counters("hadron:http_requests_total", "Replies whose head was sent, by route and status.", &["model_name", "route", "code"])?;
        for route in ROUTES {
            requests.with_label_values(&[f.model(), route, "200"]);
        }
        let ignored = f.open_counters("hadron:ignored_fields_total", "Request fields that nobody read.", &["model_name"])?;
        let refusals = f.open_counters("hadron:admission_rejections_total", "Requests refused for load or for the server's state, by the reason.", &["model_name", "reason"])?;
        let vllm = f.open_counters("vllm:admission_rejections_total", "Requests refused for load, by the limit.", &["model_name", "reason"])?;
        let of = |family: &IntCounterVec, reason| (reason, family.with_label_values(&[f.model(), reason]));
        Ok(Self {
            open_streams: f.gauge("hadron:http_open_streams", "Streamed replies whose body is not complete.")?,
            ignored_fields: ignored.with_label_values(&[f.model()]),
            rejections: REJECTION_REASONS.map(|reason| of(&refusals, reason)).into(),
            vllm_rejections: VLLM_REJECTION_REASONS.map(|reason| of(&vllm, reason)).into(),
            tokenize: f.histograms("hadron:tokenize_seconds", "Time to read a body: JSON, template, tokenizer, hashes.", HistogramFamily::WorkSeconds, ("result", ["ok", "error"]))?,
            model: f.model().to_owned(),
            requests,
        })
    }

    /// The head of a reply of this route and status is sent.
    pub fn replied(&self, route: &str, code: u16) {
        self.requests.with_label_values(&[self.model.as_str(), route, &code.to_string()]).inc();
    }

    /// A request was refused; reasons that are not about load or state count nothing.
    pub fn rejected(&self, reason: &str) {
        for counter in
            self.rejections.get(reason).into_iter().chain(self.vllm_rejections.get(reason))
        {
            counter.inc();
        }
    }

    /// So many requests were refused while there was nowhere to count them: the model was being loaded.
    pub fn rejected_at_startup(&self, requests: u64) {
        if let Some(counter) = self.rejections.get("starting") {
            counter.inc_by(requests);
        }
    }

    /// So many fields of a request were not read.
    pub fn ignored(&self, fields: usize) {
        self.ignored_fields.inc_by(fields as u64);
    }

    /// Reading a body took so long, and succeeded or not.
    pub fn read_body(&self, took: Duration, ok: bool) {
        self.tokenize[usize::from(!ok)].observe(took.as_secs_f64());
    }

    /// A stream opens; it ends with the returned value.
    pub fn stream(&self) -> OpenStream {
        self.open_streams.inc();
        OpenStream { open: self.open_streams.clone() }
    }
}

/// A stream that has not ended.
pub struct OpenStream {
    open: Gauge,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.open.dec();
    }
}
