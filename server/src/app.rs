//! State shared by all handlers: options, health and, once the model is loaded, the serving context.

use super::api_error::ApiError;
use super::auth::ApiKeys;
use super::conversations::ConversationStore;
use super::cors::CorsConfig;
use super::model_names::ServedModelNames;
use super::openai::SpecDecodeMetricsOptions;
use super::openai::chat::ReasoningFieldNames;
use super::openai::generation::draining;
use super::openai::params::{FieldBounds, SamplingDefaults};
use super::pooling::PoolerSettings;
use super::rejection_log::RejectionLog;
use super::request_ids::RequestIdGenerator;
use super::request_spans::RequestSpanExporter;
use super::request_trace::RequestTracer;
use super::responses::ResponseStore;
use super::runner_guard::{RunnerType, wrong_runner};
use super::text_pool::TextConcurrencyLimiter;
use axum::http::StatusCode;
use bytes::Bytes;
use engine::EngineClient;
use engine::{HealthMonitor, ServerStatus};
use grammar::GrammarCompilePool;
use metrics::kv_events::KvEventPublisherInfo;
use metrics::{LogRateLimiter, ServerMetrics};
use serde_json::{Map, Value};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use text::{ChatTemplate, OutputParserConfig, RequestTemplateRenderer, Tokenizer};
use tokio::sync::Mutex;

/// Maximum number of characters of a requested model name that are shown in an error message.
const MODEL_NAME_SHOWN: usize = 128;

/// Options of the HTTP server, set at startup.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Message of 503 replies and probes while the model is being loaded.
    pub starting: &'static str,
    /// Timeout for receiving a whole request body.
    pub body_timeout: Duration,
    /// Time without output after which a stream sends an SSE comment (keep-alive); zero = never.
    pub keep_alive: Duration,
    /// HTTP status of overload errors: 429 or 503.
    pub overload_status: StatusCode,
    /// Whether unknown request fields are rejected.
    pub strict_fields: bool,
    /// Whether every chunk of every stream contains `usage` (`--enable-force-include-usage`).
    pub force_usage: bool,
    /// Whether `usage` contains `prompt_tokens_details`.
    pub usage_details: bool,
    /// Default of `return_tokens_as_token_ids`: whether log-probabilities show tokens as `token_id:N`.
    pub tokens_as_ids: bool,
    /// Names of the reply fields that contain reasoning.
    pub reasoning_field: ReasoningFieldNames,
    /// Whether `/tokenizer_info` is enabled.
    pub tokenizer_info: bool,
    /// Value of `owned_by` in `/v1/models`.
    pub owned_by: String,
    /// Statistics of draft tokens in replies; `None` = replies have none.
    pub spec_decode_metrics: Option<SpecDecodeMetricsOptions>,
    /// Whether the executors can record profiler traces.
    pub profile: bool,
    /// API keys of clients and operators.
    pub api_keys: ApiKeys,
    /// Whether an access line is logged for each request (`--enable-log-requests`).
    pub log_requests: bool,
    /// Exporter of request spans (`--otlp-traces-endpoint`); `None` = requests have no spans.
    pub spans: Option<RequestSpanExporter>,
    /// Tracer of finished requests (`--trace-requests`); `None` = requests are not traced.
    pub tracer: Option<RequestTracer>,
    /// CORS settings; `None` = no cross-origin access.
    pub cors: Option<CorsConfig>,
    /// Whether a separate listener for admin routes (`--admin-listen`) exists.
    pub admin_listener: bool,
    /// Whether `/metrics` requires an API key.
    pub metrics_require_key: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            starting: "the model is being loaded",
            body_timeout: Duration::from_secs(30),
            keep_alive: Duration::from_secs(15),
            overload_status: StatusCode::TOO_MANY_REQUESTS,
            strict_fields: false,
            force_usage: false,
            usage_details: true,
            tokens_as_ids: false,
            reasoning_field: ReasoningFieldNames::Both,
            tokenizer_info: false,
            owned_by: "vllm".to_owned(),
            spec_decode_metrics: None,
            profile: false,
            api_keys: ApiKeys::default(),
            log_requests: false,
            spans: None,
            tracer: None,
            cors: None,
            admin_listener: false,
            metrics_require_key: false,
        }
    }
}

/// Model information in `/v1/models` and in replies.
#[derive(Debug, Clone)]
pub struct ModelCard {
    /// Names under which the model is served.
    pub names: ServedModelNames,
    /// Path of the model folder, or model id on the Hugging Face hub.
    pub root: String,
    /// Unix time of the server's start, in seconds.
    pub created: u64,
    /// `system_fingerprint` of replies: `hadron-<version>-<first 8 hex digits of the model hash>`.
    pub fingerprint: String,
}

/// Objects needed to serve requests; they exist once the model is loaded.
pub struct ServingContext {
    /// Client of the engine, which submits requests.
    pub client: EngineClient,
    /// Pool that compiles the grammars of constrained requests.
    pub grammars: GrammarCompilePool,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template of the model; without one, chat requests are rejected.
    pub template: Option<ChatTemplate>,
    /// Reasoning and tool-call parsers of the output.
    pub parsers: OutputParserConfig,
    /// Pooling settings (`--runner pooling`); `None` = the server generates text.
    pub pooler: Option<PoolerSettings>,
    /// Model names and model information that the API reports.
    pub card: ModelCard,
    /// Valid ranges of request fields, which depend on the model and the command line.
    pub field_bounds: FieldBounds,
    /// Sampling parameters for requests that do not set them.
    pub sampling_defaults: SamplingDefaults,
    /// Default template variables (`--default-chat-template-kwargs`), which requests may override.
    pub template_defaults: Map<String, Value>,
    /// Renderer of chat templates sent in requests, if these are allowed (`--trust-request-chat-template`).
    pub request_templates: Option<RequestTemplateRenderer>,
    /// Tokens per KV block; 0 if prefix caching is off.
    pub block_tokens: u32,
    /// Maximum size of a request body, in bytes.
    pub body_bytes_max: usize,
    /// Capacity of the KV pool of one replica, in tokens.
    pub pool_tokens: u64,
    /// Metrics that `/metrics` reports.
    pub metrics: Arc<ServerMetrics>,
    /// KV event publishers, by replica; empty if KV events are off.
    pub kv_event_sources: Vec<Arc<KvEventPublisherInfo>>,
    /// Device names of the executors, in the order of their ranks.
    pub devices: Vec<String>,
    /// Reply of `/server_info`: the configuration in force, without secrets.
    pub info: Value,
}

/// State shared by all handlers.
pub struct AppState {
    /// Server options set at startup.
    pub options: ServerOptions,
    /// Health state reported by the probes.
    pub health: Arc<HealthMonitor>,
    /// Thread pool for parsing, template rendering and tokenisation.
    pub text_pool: TextConcurrencyLimiter,
    /// Generator of request ids and seeds.
    pub id_generator: RequestIdGenerator,
    /// OpenAPI document, generated on first use.
    pub openapi: OnceLock<Bytes>,
    /// Log of rejected requests.
    pub rejections: RejectionLog,
    /// Limits warnings about requests with tools that the chat template does not show.
    pub(crate) hidden_tools: LogRateLimiter,
    /// Stored conversations that responses may continue.
    pub conversations: ConversationStore,
    /// Stored responses that clients may fetch and continue.
    pub responses: ResponseStore,
    /// Lock that allows one listing of cached blocks (`/debug/kv`) at a time.
    pub kv_listing: Mutex<()>,
    /// Lock that allows one probe of `/health_generate` in the engine at a time.
    pub generation_probe: Mutex<()>,
    serving: OnceLock<Arc<ServingContext>>,
    /// Whether the chat template shows system messages in the middle of a conversation; determined when the
    /// first such request arrives.
    shows_inline_system: OnceLock<bool>,
    /// Whether the chat template shows developer messages in the middle of a conversation; determined when the
    /// first such request arrives.
    shows_inline_developer: OnceLock<bool>,
    /// Number of requests rejected before `serving` was set; it is added to the metrics once the model is
    /// loaded.
    rejected_at_startup: AtomicU64,
}

impl AppState {
    /// Creates the state of a server that has not loaded its model yet.
    pub fn new(options: ServerOptions, health: Arc<HealthMonitor>) -> Self {
        let (text_pool, id_generator) =
            (TextConcurrencyLimiter::new(), RequestIdGenerator::default());
        let (openapi, serving) = (OnceLock::new(), OnceLock::new());
        let (shows_inline_system, shows_inline_developer) = (OnceLock::new(), OnceLock::new());
        let rejections = RejectionLog::default();
        let (conversations, responses) = (ConversationStore::default(), ResponseStore::default());
        let rejected_at_startup = AtomicU64::new(0);
        let (kv_listing, generation_probe) = (Mutex::default(), Mutex::default());
        Self {
            options,
            health,
            text_pool,
            id_generator,
            openapi,
            rejections,
            hidden_tools: LogRateLimiter::default(),
            conversations,
            responses,
            kv_listing,
            generation_probe,
            serving,
            shows_inline_system,
            shows_inline_developer,
            rejected_at_startup,
        }
    }

    /// Stores the serving context once the model is loaded. Only the first call has an effect.
    pub fn set_serving(&self, serving: ServingContext) {
        if self.serving.set(Arc::new(serving)).is_ok() {
            self.health.set_started();
            self.flush_rejections();
        }
    }

    /// Counts a request that was rejected because the model is not loaded.
    pub fn count_startup_rejection(&self) {
        // SeqCst orders the counter with `serving`: either this thread sees the serving context, or the
        // thread that sets the serving context sees this rejection.
        self.rejected_at_startup.fetch_add(1, Ordering::SeqCst);
        self.flush_rejections();
    }

    fn flush_rejections(&self) {
        fence(Ordering::SeqCst);
        if let Some(serving) = self.serving.get() {
            let rejected = self.rejected_at_startup.swap(0, Ordering::SeqCst);
            serving.metrics.http.rejected_at_startup(rejected);
        }
    }

    /// Returns the serving context if the model is loaded, regardless of the health status.
    pub fn serving(&self) -> Result<&Arc<ServingContext>, ApiError> {
        self.serving.get().ok_or_else(|| self.starting())
    }

    /// Creates the 503 error for requests that arrive before the model is loaded.
    pub fn starting(&self) -> ApiError {
        ApiError::unavailable("starting", self.options.starting, 10)
    }

    /// Whether the model's chat template shows system messages in the middle of a conversation.
    pub fn shows_inline_system(&self, serving: &ServingContext) -> bool {
        let template = serving.template.as_ref();
        *self
            .shows_inline_system
            .get_or_init(|| template.is_some_and(|template| template.shows_inline("system")))
    }

    /// Whether the model's chat template shows developer messages in the middle of a conversation.
    pub fn shows_inline_developer(&self, serving: &ServingContext) -> bool {
        let template = serving.template.as_ref();
        *self
            .shows_inline_developer
            .get_or_init(|| template.is_some_and(|template| template.shows_inline("developer")))
    }

    /// Returns the serving context for a new request.
    ///
    /// Errors: HTTP status 503 while the server is starting or shutting down, or if the engine is
    /// unavailable or stalled.
    pub fn accepting(&self) -> Result<&Arc<ServingContext>, ApiError> {
        match self.health.status() {
            ServerStatus::Draining => Err(draining()),
            ServerStatus::Unavailable | ServerStatus::Stalled => {
                Err(ApiError::unavailable("engine_unavailable", "the engine is not available", 10))
            }
            // Requests accepted while executors restart wait until the restart is complete.
            ServerStatus::Starting | ServerStatus::Serving | ServerStatus::Restarting => {
                self.serving()
            }
        }
    }
}

impl ServingContext {
    /// Returns the pooling settings.
    ///
    /// Errors: HTTP status 400 if the server generates text.
    pub(crate) fn pooler(&self) -> Result<&PoolerSettings, ApiError> {
        self.pooler.as_ref().ok_or_else(|| wrong_runner(RunnerType::Pooling))
    }

    /// Returns the model name to report in the reply.
    ///
    /// Errors: 404 if the requested model is not served.
    pub fn check_model(&self, requested: Option<&str>) -> Result<String, ApiError> {
        let Some(requested) = requested else {
            return Ok(self.card.names.first().to_owned());
        };
        if self.card.names.includes(requested) {
            return Ok(requested.to_owned());
        }
        // The requested name may be as long as the request body, so the error message contains only its
        // start.
        let shown: String = requested.chars().take(MODEL_NAME_SHOWN).collect();
        let message =
            format!("the model {shown:?} is not served; GET /v1/models lists the served models");
        let error = ApiError::new(StatusCode::NOT_FOUND, "unknown_model", message);
        Err(ApiError { param: Some("model".to_owned()), ..error })
    }
}
