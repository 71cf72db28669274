//! Access log (`--enable-log-requests`): one line per request when its reply is complete or its client has
//! disconnected.

use super::routes::PROBE_PATHS;
use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::{Method, Response, StatusCode};
use axum::middleware::Next;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use scheduler::TokenEvent;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;
use tracing::Span;

/// Status of requests whose client disconnected before the reply, as in nginx.
const CLIENT_CLOSED_REQUEST: u16 = 499;
/// Route of requests that match no route.
const NO_ROUTE: &str = "unknown";

/// Counts of one request for its access line. Clones share the counts: the handler of the request finds them
/// in the extensions of the request.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessRecord(Arc<Mutex<AccessCounts>>);

#[derive(Debug, Default)]
struct AccessCounts {
    /// Number of prompt tokens; `None` = the request generates nothing.
    prompt_tokens: Option<u64>,
    output_tokens: u64,
    first_token: Option<Instant>,
    /// Finish reasons of the choices that have ended, without repetition.
    finish_reasons: Vec<&'static str>,
}

impl AccessRecord {
    fn counts(&self) -> MutexGuard<'_, AccessCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a generation with these prompts was submitted.
    pub(crate) fn begin(&self, prompt_tokens: &[u32]) {
        self.counts().prompt_tokens = Some(prompt_tokens.iter().copied().map(u64::from).sum());
    }

    /// Records tokens of a choice.
    pub(crate) fn record(&self, event: &TokenEvent) {
        if event.tokens.is_empty() {
            return;
        }
        let mut counts = self.counts();
        counts.output_tokens += event.tokens.len() as u64;
        counts.first_token.get_or_insert_with(Instant::now);
    }

    /// Records the finish reason of a choice.
    pub(crate) fn end(&self, finish: &'static str) {
        let mut counts = self.counts();
        if !counts.finish_reasons.contains(&finish) {
            counts.finish_reasons.push(finish);
        }
    }
}

/// Handles a request and logs its access line.
pub(crate) async fn log_requests(
    route: Option<MatchedPath>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let record = AccessRecord::default();
    let mut line = AccessLine {
        method: request.method().clone(),
        route: route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str).to_owned(),
        status: CLIENT_CLOSED_REQUEST,
        received: Instant::now(),
        record: record.clone(),
        span: Span::current(),
    };
    request.extensions_mut().insert(record);
    let response = next.run(request).await;
    line.status = response.status().as_u16();
    response.map(|body| Body::new(LoggedBody { body, _line: line }))
}

/// Access line of one request; it is logged when it is dropped.
struct AccessLine {
    method: Method,
    route: String,
    status: u16,
    received: Instant,
    record: AccessRecord,
    span: Span,
}

impl AccessLine {
    fn milliseconds_until(&self, end: Instant) -> f64 {
        let micros = end.duration_since(self.received).as_micros();
        micros as f64 / 1e3
    }
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        let counts = self.record.counts();
        let is_probe = PROBE_PATHS.contains(&self.route.as_str()) || self.route == "/metrics";
        if is_probe && self.status == StatusCode::OK {
            return; // Probes and scrapes arrive every few seconds and say nothing.
        }
        let finish_reason = finish_reason(&counts);
        let _entered = self.span.enter();
        tracing::info!(
            method = %self.method,
            route = self.route,
            status = self.status,
            finish_reason = finish_reason.as_deref(),
            prompt_tokens = counts.prompt_tokens,
            output_tokens = counts.prompt_tokens.map(|_| counts.output_tokens),
            ttft_ms = counts.first_token.map(|at| self.milliseconds_until(at)),
            duration_ms = self.milliseconds_until(Instant::now()),
            "request finished"
        );
    }
}

/// Returns the finish reasons of a generation. A generation without one was ended because the client
/// disconnected.
fn finish_reason(counts: &AccessCounts) -> Option<String> {
    counts.prompt_tokens?;
    match counts.finish_reasons.as_slice() {
        [] => Some("client_gone".to_owned()),
        reasons => Some(reasons.join(",")),
    }
}

/// Body of a reply. Its access line is logged after the body is dropped, which ends a generation.
struct LoggedBody {
    body: Body,
    _line: AccessLine,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finish_reasons_of_choices_are_joined() {
        let record = AccessRecord::default();
        assert_eq!(finish_reason(&record.counts()), None);
        record.begin(&[3, 4]);
        assert_eq!(finish_reason(&record.counts()).as_deref(), Some("client_gone"));
        for reason in ["stop", "length", "stop"] {
            record.end(reason);
        }
        let counts = record.counts();
        assert_eq!(finish_reason(&counts).as_deref(), Some("stop,length"));
        assert_eq!(counts.prompt_tokens, Some(7));
    }
}
