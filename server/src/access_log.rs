//! Access log (`--enable-log-requests`) and trace spans (`--otlp-traces-endpoint`). Each request gets one log
//! line and one span, written when its reply is complete or its client has disconnected.

use super::access_record::AccessLogRecord;
use super::app::AppState;
use super::guarded_body::guarded;
use super::routes::PROBE_PATHS;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, Response, StatusCode};
use axum::middleware::Next;
use std::sync::Arc;
use std::time::Instant;
use tracing::Span;

/// Route name in the access log for requests that match no route.
const NO_ROUTE: &str = "unknown";

/// Middleware that handles a request, writes its access log line and ends its trace span.
pub(crate) async fn record_requests(
    State(app): State<Arc<AppState>>,
    route: Option<MatchedPath>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
    let spans = app.options.spans.as_ref();
    let span = spans.and_then(|spans| spans.begin(request.method(), route, request.headers()));
    let record = AccessLogRecord::new(span);
    let line = app.options.log_requests.then(|| AccessLogLine {
        method: request.method().clone(),
        route: route.to_owned(),
        received: Instant::now(),
        record: record.clone(),
        span: Span::current(),
    });
    request.extensions_mut().insert(record.clone());
    let response = next.run(request).await;
    record.counts().status = response.status().as_u16();
    guarded(response, AccessLogGuard { _line: line, _record: record })
}

/// Access log line of one request; the line is written to the log when this object is dropped.
struct AccessLogLine {
    method: Method,
    route: String,
    received: Instant,
    record: AccessLogRecord,
    span: Span,
}

impl AccessLogLine {
    fn milliseconds_until(&self, end: Instant) -> f64 {
        let micros = end.duration_since(self.received).as_micros();
        micros as f64 / 1e3
    }
}

impl Drop for AccessLogLine {
    fn drop(&mut self) {
        let counts = self.record.counts();
        let is_probe = PROBE_PATHS.contains(&self.route.as_str()) || self.route == "/metrics";
        if is_probe && counts.status == StatusCode::OK {
            return; // Probes and scrapes arrive every few seconds and say nothing.
        }
        let finish_reason = counts.finish_reasons().map(|reasons| reasons.join(","));
        let _entered = self.span.enter();
        tracing::info!(
            method = %self.method,
            route = self.route,
            status = counts.status,
            finish_reason = finish_reason.as_deref(),
            prompt_tokens = counts.prompt_tokens,
            output_tokens = counts.prompt_tokens.map(|_| counts.output_tokens),
            ttft_ms = counts.first_token.map(|at| self.milliseconds_until(at)),
            duration_ms = self.milliseconds_until(Instant::now()),
            "request finished"
        );
    }
}

/// Guard attached to a reply body and dropped after it. Dropping the body ends the generation; dropping
/// `_line` then writes the access log line; dropping `_record` ends the trace span.
struct AccessLogGuard {
    _line: Option<AccessLogLine>,
    _record: AccessLogRecord,
}
