//! Attributes of request spans.
//!
//! Names: OpenTelemetry semantic conventions for generative AI spans and for HTTP spans
//! (<https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/>). `gen_ai.latency.*`, `gen_ai.request.id` and
//! `gen_ai.usage.prompt_tokens`, `.completion_tokens` are the names of vLLM's spans.

use crate::access_record::AccessLogFields;
use crate::request_spans::{SpanGenerationParams, SpanSamplingParams};
use axum::http::Method;
use opentelemetry::{Array, KeyValue, StringValue, Value};
use std::time::Instant;

/// `gen_ai.provider.name` of all spans.
const PROVIDER: &str = "hadron";

/// Returns `gen_ai.operation.name` for requests of a route; `None` if the route has no spans.
pub(crate) fn operation_of(method: &Method, route: &str) -> Option<&'static str> {
    if method != Method::POST {
        return None;
    }
    match route {
        "/v1/chat/completions" | "/v1/messages" | "/v1/responses" => Some("chat"),
        "/v1/completions" | "/generate" => Some("text_completion"),
        "/v1/embeddings" | "/embeddings" => Some("embeddings"),
        "/v1/score" | "/score" => Some("score"),
        "/v1/rerank" | "/v2/rerank" | "/rerank" => Some("rerank"),
        _ => None,
    }
}

/// Returns the HTTP attributes that are known when the request arrives.
pub(crate) fn http_attributes(method: &Method, route: &str) -> Vec<KeyValue> {
    vec![
        KeyValue::new("http.request.method", method.as_str().to_owned()),
        KeyValue::new("http.route", route.to_owned()),
    ]
}

/// Returns the attributes of a request. `parameters` is `None` if the request was rejected before a
/// generation began.
pub(crate) fn request_attributes(
    operation: &'static str,
    parameters: Option<&SpanGenerationParams>,
) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", PROVIDER),
    ];
    let Some(parameters) = parameters else { return attributes };
    let mut add = |name: &'static str, value: Value| attributes.push(KeyValue::new(name, value));
    add("gen_ai.request.model", parameters.model.clone().into());
    add("gen_ai.response.model", parameters.model.clone().into());
    add("gen_ai.request.id", parameters.request_id.clone().into());
    add("gen_ai.request.stream", parameters.stream.into());
    attributes.extend(parameters.sampling.iter().flat_map(sampling_attributes));
    attributes
}

/// Returns the attributes of sampling parameters.
fn sampling_attributes(sampling: &SpanSamplingParams) -> Vec<KeyValue> {
    let mut attributes = Vec::new();
    let mut add = |name: &'static str, value: Value| attributes.push(KeyValue::new(name, value));
    add("gen_ai.request.choice.count", i64::from(sampling.n).into());
    add("gen_ai.request.temperature", f64::from(sampling.temperature).into());
    add("gen_ai.request.top_p", f64::from(sampling.top_p).into());
    if sampling.top_k > 0 {
        add("gen_ai.request.top_k", i64::from(sampling.top_k).into());
    }
    if let Some(limit) = sampling.max_tokens {
        add("gen_ai.request.max_tokens", i64::from(limit).into());
    }
    if let Some(seed) = sampling.seed {
        add("gen_ai.request.seed", seed.into());
    }
    for (name, penalty) in [
        ("gen_ai.request.frequency_penalty", sampling.frequency_penalty),
        ("gen_ai.request.presence_penalty", sampling.presence_penalty),
    ] {
        if penalty != 0.0 {
            add(name, f64::from(penalty).into());
        }
    }
    if !sampling.stop.is_empty() {
        add("gen_ai.request.stop_sequences", strings(&sampling.stop));
    }
    attributes
}

/// Returns the attributes of a reply. `received` is the arrival time of the request.
pub(crate) fn usage_attributes(counts: &AccessLogFields, received: Instant) -> Vec<KeyValue> {
    let mut attributes = Vec::new();
    let mut add = |name: &'static str, value: Value| attributes.push(KeyValue::new(name, value));
    add("http.response.status_code", i64::from(counts.status).into());
    if counts.status >= 400 {
        add("error.type", counts.status.to_string().into());
    }
    let Some(prompt_tokens) = counts.prompt_tokens else { return attributes };
    for name in ["gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"] {
        add(name, (prompt_tokens as i64).into());
    }
    for name in ["gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"] {
        add(name, (counts.output_tokens as i64).into());
    }
    add("gen_ai.usage.cache_read.input_tokens", (counts.cached_tokens as i64).into());
    let reasons = counts.finish_reasons().unwrap_or_default();
    add("gen_ai.response.finish_reasons", strings(&reasons));
    if let Some(queued) = counts.queued {
        add("gen_ai.latency.time_in_queue", queued.as_secs_f64().into());
    }
    if let Some(first) = counts.first_token {
        let seconds = first.duration_since(received).as_secs_f64();
        add("gen_ai.latency.time_to_first_token", seconds.into());
    }
    add("gen_ai.latency.e2e", received.elapsed().as_secs_f64().into());
    attributes
}

/// Returns a string-array attribute value.
fn strings(values: &[impl AsRef<str>]) -> Value {
    let values = values.iter().map(|value| StringValue::from(value.as_ref().to_owned())).collect();
    Value::Array(Array::String(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pooled_requests_have_no_attributes_of_sampling() {
        let parameters = SpanGenerationParams {
            model: "m".to_owned(),
            request_id: "r".to_owned(),
            stream: false,
            sampling: None,
        };
        let mut attributes = request_attributes("embeddings", Some(&parameters));
        let mut counts = AccessLogFields::default();
        counts.prompt_tokens = Some(3);
        counts.finish_reasons.push("stop");
        counts.parameters = Some(Box::new(parameters));
        attributes.extend(usage_attributes(&counts, Instant::now()));
        let names: Vec<&str> = attributes.iter().map(|attribute| attribute.key.as_str()).collect();
        for name in ["gen_ai.usage.input_tokens", "gen_ai.response.finish_reasons"] {
            assert!(names.contains(&name), "{names:?}");
        }
        for name in [
            "gen_ai.request.temperature",
            "gen_ai.request.top_p",
            "gen_ai.request.choice.count",
            "gen_ai.request.max_tokens",
        ] {
            assert!(!names.contains(&name), "{name}");
        }
    }
}
