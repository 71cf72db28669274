//! OpenTelemetry spans (`--otlp-traces-endpoint`): one span per request of a generation route, exported by
//! OTLP over HTTP. If the request has a `traceparent` header, the span becomes part of the client's trace.

use crate::access_record::AccessLogFields;
use crate::span_attributes::{http_attributes, operation_of, request_attributes, usage_attributes};
use async_trait::async_trait;
use axum::http::{HeaderMap, Method};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanBuilder, SpanKind, Status, Tracer, TracerProvider};
use opentelemetry::{Context, Key, KeyValue};
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{Bytes, HeaderExtractor, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig, WithHttpConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Handle;

/// Deadline of one export request to the collector.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// `service.name` of the exported spans if the environment does not set it.
const SERVICE_NAME: &str = "hadron";

/// Exporter of request spans. Spans are queued without blocking; if the queue is full, spans are dropped and
/// the drop is logged.
#[derive(Debug, Clone)]
pub struct RequestSpanExporter {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// Error: spans cannot be exported to an endpoint.
#[derive(Debug, thiserror::Error)]
pub enum SpanEndpointError {
    /// The endpoint is not a URL of OTLP over HTTP.
    #[error(
        "{endpoint:?} is not an http:// URL: spans are exported by OTLP over HTTP (http/protobuf), for example to \
         http://127.0.0.1:4318/v1/traces; gRPC and TLS are not supported"
    )]
    Scheme {
        /// Value of `--otlp-traces-endpoint`.
        endpoint: String,
    },
    /// The exporter rejects its configuration, for example an `OTEL_*` environment variable.
    #[error("cannot export spans to {endpoint:?}: {cause}")]
    Exporter {
        /// Value of `--otlp-traces-endpoint`.
        endpoint: String,
        /// Error of the exporter.
        cause: ExporterBuildError,
    },
}

impl RequestSpanExporter {
    /// Creates an exporter to `endpoint`, for example `http://127.0.0.1:4318/v1/traces`. It sends its
    /// requests on `runtime`.
    ///
    /// Errors: the endpoint is not an `http://` URL, or the exporter configuration is invalid.
    pub fn open(endpoint: &str, runtime: Handle) -> Result<Self, SpanEndpointError> {
        if !endpoint.starts_with("http://") {
            return Err(SpanEndpointError::Scheme { endpoint: endpoint.to_owned() });
        }
        let client = HyperClient::with_default_connector(EXPORT_TIMEOUT, None);
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(SpanExportClient { client, runtime })
            .with_endpoint(endpoint)
            .with_protocol(Protocol::HttpBinary)
            .build()
            .map_err(|cause| SpanEndpointError::Exporter {
                endpoint: endpoint.to_owned(),
                cause,
            })?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_batch_exporter(exporter)
            .build();
        let tracer = provider.tracer(SERVICE_NAME);
        Ok(Self { provider, tracer })
    }

    /// Exports the queued spans within `limit` and shuts the exporter down; returns whether this succeeded.
    #[must_use]
    pub fn close(&self, limit: Duration) -> bool {
        self.provider.shutdown_with_timeout(limit).is_ok()
    }

    /// Begins the span of a request; `None` if requests of `route` have no spans.
    pub(crate) fn begin(
        &self,
        method: &Method,
        route: &str,
        headers: &HeaderMap,
    ) -> Option<RequestSpan> {
        let operation = operation_of(method, route)?;
        Some(RequestSpan {
            tracer: self.tracer.clone(),
            parent: TraceContextPropagator::new()
                .extract_with_context(&Context::new(), &HeaderExtractor(headers)),
            operation,
            http: http_attributes(method, route),
            started: SystemTime::now(),
            received: Instant::now(),
        })
    }
}

/// Returns the OpenTelemetry resource of the spans; the SDK reads `OTEL_SERVICE_NAME` and
/// `OTEL_RESOURCE_ATTRIBUTES`.
fn resource() -> Resource {
    let detected = Resource::builder().build();
    let name = detected.get(&Key::from_static_str("service.name"));
    let is_unknown = name.is_none_or(|name| name.as_str().starts_with("unknown_service"));
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let resource = Resource::builder().with_attribute(version);
    if is_unknown { resource.with_service_name(SERVICE_NAME).build() } else { resource.build() }
}

/// HTTP client of the exporter. It sends on `runtime`, because the exporter's own thread has no async
/// runtime.
#[derive(Debug)]
struct SpanExportClient {
    client: HyperClient,
    runtime: Handle,
}

#[async_trait]
impl HttpClient for SpanExportClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}

/// Generation parameters shown in the span.
#[derive(Debug)]
pub(crate) struct SpanGenerationParams {
    /// Requested model name, or the first served name.
    pub model: String,
    /// Request id.
    pub request_id: String,
    /// Whether the reply is streamed.
    pub stream: bool,
    /// Sampling parameters; `None` for a pooling request, which samples no token.
    pub sampling: Option<SpanSamplingParams>,
}

/// Sampling parameters shown in the span.
#[derive(Debug)]
pub(crate) struct SpanSamplingParams {
    /// Number of choices per prompt.
    pub n: u32,
    /// Maximum number of output tokens; `None` if the request sets no limit.
    pub max_tokens: Option<u32>,
    /// Softmax temperature.
    pub temperature: f32,
    /// Top-p (nucleus sampling) threshold.
    pub top_p: f32,
    /// Number of most likely tokens that sampling considers; 0 = all.
    pub top_k: u32,
    /// Frequency penalty.
    pub frequency_penalty: f32,
    /// Presence penalty.
    pub presence_penalty: f32,
    /// Sampling seed set by the request.
    pub seed: Option<i64>,
    /// Stop strings.
    pub stop: Vec<String>,
}

/// Trace span of one request, not yet ended.
#[derive(Debug)]
pub(crate) struct RequestSpan {
    tracer: SdkTracer,
    parent: Context,
    operation: &'static str,
    http: Vec<KeyValue>,
    started: SystemTime,
    received: Instant,
}

impl RequestSpan {
    /// Ends the span with the request's counts and queues it for export.
    pub(crate) fn end(self, counts: &AccessLogFields) {
        let parameters = counts.parameters.as_deref();
        let name = match parameters {
            Some(parameters) => format!("{} {}", self.operation, parameters.model),
            None => self.operation.to_owned(),
        };
        let mut attributes = self.http;
        attributes.extend(request_attributes(self.operation, parameters));
        attributes.extend(usage_attributes(counts, self.received));
        let builder = SpanBuilder::from_name(name)
            .with_kind(SpanKind::Server)
            .with_start_time(self.started)
            .with_attributes(attributes);
        let mut span = self.tracer.build_with_context(builder, &self.parent);
        if counts.status >= 500 || counts.finish_reasons.contains(&"error") {
            span.set_status(Status::error("the request failed"));
        }
        span.end();
    }
}
