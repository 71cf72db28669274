//! Options of the HTTP server.

use crate::config::{
    AccessArgs, LogArgs, OverloadHttpStatus, ReasoningFieldArg, ServeArgs, SpecDecodeMetricsArg,
    SpeculationArgs, StringListArg,
};
use anyhow::{Context, Result, bail};
use hyper::StatusCode;
use server::openai::SpecDecodeMetricsOptions;
use server::openai::chat::ReasoningFieldNames;
use server::{ApiKeys, CorsConfig, RequestSpanExporter, RequestTracer, ServerOptions};
use tokio::runtime::Handle;

const BODY_BYTES_MAX: usize = 64 << 20;

const BODY_BYTES_MIN: usize = 8 << 20;

/// Returns the options of the HTTP server.
///
/// Errors: API keys cannot be read; the CORS options are invalid; the request trace file cannot be opened; spans
/// cannot be exported to the endpoint.
pub fn options(args: &ServeArgs, runtime: &Handle) -> Result<ServerOptions> {
    let (reply, access) = (&args.reply, &args.access);
    let clients = access.client_keys()?;
    let keys = ApiKeys::new(
        clients.iter().map(String::as_str),
        access.admin_key.iter().map(String::as_str),
    );
    let defaults = ServerOptions::default();
    Ok(ServerOptions {
        api_keys: keys,
        admin_listener: access.admin_listen.is_some(),
        metrics_require_key: access.metrics_require_key,
        cors: cors(access)?,
        log_requests: args.log.enable_log_requests,
        spans: spans(&args.log, runtime)?,
        tracer: tracer(&args.log)?,
        keep_alive: args.http.sse_keep_alive_interval.0,
        overload_status: match args.engine.admission_status {
            OverloadHttpStatus::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
            OverloadHttpStatus::ServiceUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        },
        strict_fields: reply.strict_fields,
        force_usage: reply.enable_force_include_usage,
        usage_details: reply.enable_prompt_tokens_details,
        tokens_as_ids: reply.return_tokens_as_token_ids,
        reasoning_field: match reply.reasoning_field {
            ReasoningFieldArg::Both => ReasoningFieldNames::Both,
            ReasoningFieldArg::Reasoning => ReasoningFieldNames::Reasoning,
            ReasoningFieldArg::ReasoningContent => ReasoningFieldNames::ReasoningContent,
        },
        tokenizer_info: reply.enable_tokenizer_info_endpoint,
        owned_by: reply.owned_by.clone(),
        spec_decode_metrics: spec_decode_metrics(&args.speculation),
        profile: args.engine.profile.is_some(),
        starting: match args.nodes.cluster() {
            Some(_) => "waiting for other nodes or loading the model; the log names missing nodes",
            None => defaults.starting,
        },
        ..defaults
    })
}

/// Returns the statistics of draft tokens in replies; `None` = replies have none.
fn spec_decode_metrics(args: &SpeculationArgs) -> Option<SpecDecodeMetricsOptions> {
    let draft_tokens = args.speculation()?.draft_tokens;
    let with_steps = match args.reply_metrics() {
        SpecDecodeMetricsArg::None => return None,
        SpecDecodeMetricsArg::Summary => false,
        SpecDecodeMetricsArg::Detailed => true,
    };
    Some(SpecDecodeMetricsOptions { draft_tokens, with_steps })
}

/// Creates the exporter of spans; `None` = requests have no spans.
///
/// Errors: the endpoint or the configuration of the exporter is invalid.
fn spans(log: &LogArgs, runtime: &Handle) -> Result<Option<RequestSpanExporter>> {
    let Some(endpoint) = &log.otlp_traces_endpoint else { return Ok(None) };
    let spans = RequestSpanExporter::open(endpoint, runtime.clone());
    spans.map(Some).context("--otlp-traces-endpoint")
}

/// Opens the request trace file; `None` = requests are not traced.
///
/// Errors: the file cannot be opened for writing.
fn tracer(log: &LogArgs) -> Result<Option<RequestTracer>> {
    let Some(path) = &log.trace_requests else { return Ok(None) };
    let tracer = RequestTracer::open(path, log.trace_prompts);
    tracer.map(Some).with_context(|| format!("--trace-requests {}", path.display()))
}

/// Returns the CORS configuration; `None` = requests from other origins are not allowed.
///
/// Errors: a name is not valid in an HTTP header.
fn cors(access: &AccessArgs) -> Result<Option<CorsConfig>> {
    let Some(origins) = &access.allowed_origins else { return Ok(None) };
    let list =
        |list: &Option<StringListArg>| list.as_ref().map_or_else(Vec::new, |list| list.0.clone());
    let cors = CorsConfig {
        origins: origins.0.clone(),
        methods: list(&access.allowed_methods),
        headers: list(&access.allowed_headers),
        credentials: access.allow_credentials,
    };
    if let Err(name) = cors.layer() {
        bail!(
            "--allowed-origins, --allowed-methods, --allowed-headers: {name} is not valid in an HTTP header"
        );
    }
    Ok(Some(cors))
}

/// Returns the maximum bytes of a request body for a model with this maximum length.
pub fn body_bytes_max(max_model_len: u32) -> usize {
    (32 * max_model_len as usize).clamp(BODY_BYTES_MIN, BODY_BYTES_MAX)
}

/// Returns the maximum bytes of a prompt that a chat template may render for a model with this maximum
/// length.
pub fn prompt_bytes_max(max_model_len: u32) -> usize {
    4 * body_bytes_max(max_model_len)
}
