//! Request handling shared by all completion endpoints: reads the body, submits the request, and writes a
//! streaming or non-streaming reply.

use super::generation::RequestGeneration;
use super::params::{CompletionParams, is_request_id};
use crate::access_record::AccessLogRecord;
use crate::api_error::ApiError;
use crate::app::{AppState, ServerOptions, ServingContext};
use crate::auth::{ApiKeys, CallerIdentity};
use crate::request_body;
use crate::request_fields::RequestFields;
use crate::request_ids::RequestIdGenerator;
use crate::request_trace::RequestTracer;
use crate::sse::{SseBody, SseEventWriter};
use crate::strict_json::JsonValue;
use axum::body::Body;
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Response, header};
use bytes::{BufMut, BytesMut};
use engine::AdmissionPermit;
use serde_json::json;
use std::future::Future;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tracing::Span;

/// Fields that identify a reply: `id`, `created`, `model` and `system_fingerprint`.
#[derive(Debug, Clone)]
pub(crate) struct ReplyMetadata {
    /// Reply id: `chatcmpl-…` or `cmpl-…`.
    pub id: String,
    /// Creation time: Unix time in seconds.
    pub created: u64,
    /// Requested model name, or the default name.
    pub model: String,
    /// System fingerprint of the model.
    pub fingerprint: String,
}

impl ReplyMetadata {
    /// Creates the fields that identify a reply; `kind` is the prefix of the reply id.
    pub(crate) fn new(
        kind: &str,
        request_id: &str,
        model: String,
        serving: &ServingContext,
    ) -> Self {
        let fingerprint = serving.card.fingerprint.clone();
        Self { id: format!("{kind}-{request_id}"), created: unix_time(), model, fingerprint }
    }

    /// Writes the start of a non-streaming reply object; `object` is the value of its `object` field.
    pub(crate) fn open(&self, object: &str, out: &mut BytesMut) {
        let Self { id, created, model, fingerprint } = self;
        let (id, model, fingerprint) = (json!(id), json!(model), json!(fingerprint));
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(
            out.writer(),
            "{{\"id\":{id},\"object\":\"{object}\",\"created\":{created},\"model\":{model},\
             \"system_fingerprint\":{fingerprint}"
        );
    }
}

/// Request parameters that clients send as HTTP headers.
#[derive(Debug, Clone, Default)]
pub(crate) struct HeaderParams {
    /// `X-Request-Id`, if it is well-formed.
    pub request_id: Option<String>,
    /// Value of `X-data-parallel-rank`, not yet validated.
    pub replica: Option<String>,
    /// Identity of the caller, from its API key.
    pub caller: CallerIdentity,
}

impl HeaderParams {
    /// Reads the parameters from the request headers. A malformed request id is ignored, because proxies send
    /// arbitrary values.
    pub(crate) fn read(headers: &HeaderMap, keys: &ApiKeys) -> Self {
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        Self {
            request_id: text("x-request-id").filter(|id| is_request_id(id)),
            replica: text("x-data-parallel-rank"),
            caller: keys.caller(headers),
        }
    }

    /// Returns the request id: from the header, else from the body, else a new one. Also stores the id in
    /// `params` for the engine, and records it in the current log span if it did not come from the header.
    pub(crate) fn request_id(
        &self,
        params: &mut CompletionParams,
        id_generator: &RequestIdGenerator,
    ) -> String {
        let client_id = self.request_id.clone().or_else(|| params.request_id.take());
        let request_id = client_id.unwrap_or_else(|| id_generator.id());
        if self.request_id.is_none() {
            Span::current().record("id", request_id.as_str());
        }
        params.request_id = Some(request_id.clone());
        request_id
    }

    /// Returns the requested replica (DP rank): from the header, else from the body.
    pub(crate) fn replica(
        &self,
        body: Option<u16>,
        replicas: u16,
    ) -> Result<Option<u16>, ApiError> {
        let Some(text) = &self.replica else { return Ok(body) };
        match text.trim().parse::<u16>() {
            Ok(rank) if rank < replicas => Ok(Some(rank)),
            _ => {
                let message = format!("X-data-parallel-rank must be below {replicas}");
                Err(ApiError::invalid("data_parallel_rank", message))
            }
        }
    }
}

/// Request of an endpoint that has been read and admitted, with the context needed to handle it.
pub(crate) struct EndpointRequest<'a> {
    /// State of the server.
    pub app: &'a Arc<AppState>,
    /// Model that serves the request.
    pub serving: &'a Arc<ServingContext>,
    /// Fields of the request body that have not been parsed yet.
    pub fields: RequestFields,
    /// Request parameters that the client sent as HTTP headers.
    pub headers: &'a HeaderParams,
    /// Permit from the admission of the request; it reserves the memory of the request.
    pub permit: AdmissionPermit,
}

/// Request that has been submitted to the engine, and the writer of its reply.
pub(crate) struct SubmittedRequest<R> {
    /// Choices of the request, which receive the generated tokens.
    pub generation: RequestGeneration,
    /// Writer of the reply in the endpoint's JSON form.
    pub reply: R,
    /// Whether the reply is streamed.
    pub stream: bool,
    /// Request id reported to the client.
    pub request_id: String,
    /// Names of the request fields that were ignored.
    pub ignored: Vec<String>,
}

/// API endpoint that submits requests to the engine: parses its requests and writes its replies.
pub(crate) trait InferenceEndpoint: Send + Sized + 'static {
    /// Writer of the chunks of a streaming reply.
    type StreamWriter: SseEventWriter + 'static;

    /// Parses, validates and submits one request. Runs on the text pool, where CPU-bound work is allowed.
    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError>;

    /// Returns the writer of the chunks of a streaming reply.
    fn stream_writer(self) -> Self::StreamWriter;

    /// Waits for the complete output and returns the JSON body of the non-streaming reply.
    fn collect(
        self,
        generation: RequestGeneration,
    ) -> impl Future<Output = Result<Body, ApiError>> + Send;
}

impl<R> SubmittedRequest<R> {
    /// Begins the trace of a request; `received` is its arrival time, `path` its route.
    fn begin_trace(&mut self, tracer: &RequestTracer, received: Instant, path: &str) {
        let head = json!({
            "created": unix_time(),
            "request_id": self.request_id,
            "path": path,
            "stream": self.stream,
        });
        self.generation.trace(tracer, received, head);
    }

    /// Adds the request to the access log, and begins its trace. The trace begins on the text pool because,
    /// if the client has disconnected, the request is dropped and no later code runs.
    fn begin_records(&mut self, options: &ServerOptions, received: Instant, parts: &Parts) {
        if let Some(access) = parts.extensions.get::<AccessLogRecord>() {
            self.generation.record_access(access.clone());
        }
        if let Some(tracer) = &options.tracer {
            self.begin_trace(tracer, received, parts.uri.path());
        }
    }
}

/// Handles one request of an endpoint and returns its reply.
pub(crate) async fn serve<E: InferenceEndpoint>(
    app: Arc<AppState>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let prepared = prepare::<E>(&app, request).await?;
    let (request_id, ignored) = (prepared.request_id.clone(), prepared.ignored.clone());
    let replied = respond(&app, prepared).await;
    let mut response = replied.map_err(|error| app.complete_engine_error(error))?;
    add_reply_headers(&mut response, Some(&request_id), &ignored);
    Ok(response)
}

/// Reads, validates and submits one request of an endpoint.
pub(crate) async fn prepare<E: InferenceEndpoint>(
    app: &Arc<AppState>,
    request: Request,
) -> Result<SubmittedRequest<E>, ApiError> {
    let received = Instant::now();
    let serving = Arc::clone(app.accepting()?);
    let (parts, body) = request.into_parts();
    let (body, permit) = request_body::read_and_admit(app, &serving, &parts.headers, body).await?;
    let bytes = body.len();
    let headers = HeaderParams::read(&parts.headers, &app.options.api_keys);
    let work = {
        let app = Arc::clone(app);
        move || {
            let started = Instant::now();
            let json = JsonValue::parse(&body);
            drop(body); // Frees the memory before the work that follows.
            let (app, serving, headers) = (&app, &serving, &headers);
            let prepared = json.and_then(RequestFields::of_body).and_then(|fields| {
                E::prepare(EndpointRequest { app, serving, fields, headers, permit })
            });
            serving.metrics.http.read_body(started.elapsed(), prepared.is_ok());
            prepared.map(|mut prepared| {
                prepared.begin_records(&app.options, received, &parts);
                prepared
            })
        }
    };
    app.text_pool.run(bytes, work).await.map_err(|error| app.complete_engine_error(error))
}

/// Waits for the first token of a streaming reply, or for the complete output of a non-streaming one, and
/// returns the reply.
pub(crate) async fn respond<E: InferenceEndpoint>(
    app: &AppState,
    mut prepared: SubmittedRequest<E>,
) -> Result<Response<Body>, ApiError> {
    if !prepared.stream {
        prepared.generation.wait_first_event().await?;
        return prepared.reply.collect(prepared.generation).await.map(json_body);
    }
    // The reply headers are sent after the first token, so that an early failure is reported with its own
    // HTTP status. If no token arrives within `keep_alive`, the headers are sent before the first token.
    let first = prepared.generation.wait_first_event();
    if app.options.keep_alive.is_zero() {
        first.await?;
    } else if let Ok(result) = tokio::time::timeout(app.options.keep_alive, first).await {
        result?;
    }
    let chunks = prepared.reply.stream_writer();
    let body = SseBody::new(prepared.generation, chunks, app.options.keep_alive);
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// Creates a response with this JSON text as its body.
pub(crate) fn json_response(text: String) -> Response<Body> {
    json_body(Body::from(text))
}

/// Creates a response with this JSON body.
pub(crate) fn json_body(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Adds the request id and the names of the ignored fields to the reply headers.
pub(crate) fn add_reply_headers(
    response: &mut Response<Body>,
    request_id: Option<&str>,
    ignored: &[String],
) {
    let headers = response.headers_mut();
    if let Some(id) = request_id.and_then(|id| HeaderValue::from_str(id).ok()) {
        headers.insert("x-request-id", id);
    }
    if !ignored.is_empty()
        && let Ok(names) = HeaderValue::from_str(&ignored.join(", "))
    {
        headers.insert("x-hadron-ignored-fields", names);
    }
}

/// Returns the names of the unparsed fields, and the paths of accepted values without effect.
///
/// Errors: HTTP status 400 if `--strict-fields` is set and a field was not parsed.
pub(crate) fn ignored_fields(
    app: &AppState,
    fields: &RequestFields,
) -> Result<Vec<String>, ApiError> {
    let mut names = fields.ignored_names();
    match names.first() {
        Some(name) if app.options.strict_fields => {
            Err(ApiError::unsupported(name.clone(), "unknown field"))
        }
        _ => {
            let hints = fields.hints();
            if let Ok(serving) = app.serving() {
                serving.metrics.http.ignored(fields.remaining() + hints.count());
            }
            names.extend(hints.names());
            Ok(names)
        }
    }
}

/// Returns the Unix time in seconds, for timestamp fields such as `created`.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
