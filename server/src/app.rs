//! What all handlers share: options, health, and, once the model is up, what it takes to serve it.

use super::api_error::ApiError;
use super::auth::ApiKeys;
use super::cors::CorsConfig;
use super::openai::chat::ReasoningField;
use super::openai::generation::draining;
use super::openai::params::{FieldBounds, SamplingDefaults};
use super::request_ids::IdGenerator;
use super::request_trace::RequestTracer;
use super::responses::ResponseStore;
use super::text_pool::TextPool;
use axum::http::StatusCode;
use bytes::Bytes;
use engine::EngineClient;
use engine::{HealthState, ServerStatus};
use grammar::GrammarCompilePool;
use metrics::ServerMetrics;
use metrics::kv_events::KvEventSource;
use serde_json::{Map, Value};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use text::{ChatTemplate, OutputParsers, RequestTemplates, Tokenizer};
use tokio::sync::Mutex;

/// Characters of a model's name in a refusal.
const MODEL_NAME_SHOWN: usize = 128;

/// Behaviour chosen at start.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// What requests and probes hear until the model is up.
    pub starting: &'static str,
    /// Time for a whole body.
    pub body_timeout: Duration,
    /// Comment on streams that are silent for so long; zero = never.
    pub keep_alive: Duration,
    /// Status of a refusal for load: 429 or 503.
    pub overload_status: StatusCode,
    /// Unknown request fields are refused.
    pub strict_fields: bool,
    /// Usage in every chunk of every stream.
    pub force_usage: bool,
    /// `prompt_tokens_details` in usage.
    pub usage_details: bool,
    /// Tokens in logprobs as `token_id:N` unless a request says otherwise.
    pub tokens_as_ids: bool,
    /// Where reasoning is shown.
    pub reasoning_field: ReasoningField,
    /// Whether `/tokenizer_info` is there.
    pub tokenizer_info: bool,
    /// Owner named by the model card.
    pub owned_by: String,
    /// Whether the executors can record traces.
    pub profile: bool,
    /// Who is let in.
    pub api_keys: ApiKeys,
    /// Where lines about finished requests go.
    pub tracer: Option<RequestTracer>,
    /// What pages of other sites may do; `None` = nothing.
    pub cors: Option<CorsConfig>,
    /// Whether operators have a listener of their own.
    pub admin_listener: bool,
    /// Whether scrapers of metrics need a key, too.
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
            reasoning_field: ReasoningField::Both,
            tokenizer_info: false,
            owned_by: "vllm".to_owned(),
            profile: false,
            api_keys: ApiKeys::default(),
            tracer: None,
            cors: None,
            admin_listener: false,
            metrics_require_key: false,
        }
    }
}

/// The model as clients know it.
#[derive(Debug, Clone)]
pub struct ModelCard {
    /// Served names; the first is the default.
    pub names: Vec<String>,
    /// Folder or hub id it came from.
    pub root: String,
    /// Unix time of start.
    pub created: u64,
    /// `hadron-<version>-<model hash8>`.
    pub fingerprint: String,
}

/// What exists once the model is up.
pub struct ServingContext {
    /// Road to the engine.
    pub client: EngineClient,
    /// What compiles the grammars of constrained requests.
    pub grammars: GrammarCompilePool,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Absent if the model has none: chat is refused then.
    pub template: Option<ChatTemplate>,
    /// How outputs are read.
    pub parsers: OutputParsers,
    /// Names and origin.
    pub card: ModelCard,
    /// Ranges of request fields.
    pub field_bounds: FieldBounds,
    /// Sampling values where a request is silent.
    pub sampling_defaults: SamplingDefaults,
    /// Template variables that requests may override (`--default-chat-template-kwargs`).
    pub template_defaults: Map<String, Value>,
    /// Renders templates of requests, if they may bring any (`--trust-request-chat-template`).
    pub request_templates: Option<RequestTemplates>,
    /// Tokens per cache block, 0 if caching is off.
    pub block_tokens: u32,
    /// Largest body.
    pub body_bytes_max: usize,
    /// Tokens the KV pool of one replica holds.
    pub pool_tokens: u64,
    /// Figures.
    pub metrics: Arc<ServerMetrics>,
    /// Publishers of KV events, by replica; empty = none.
    pub kv_event_sources: Vec<Arc<KvEventSource>>,
    /// What `/server_info` says: the configuration in force, without secrets.
    pub info: Value,
}

/// Shared by all handlers.
pub struct AppState {
    /// Behaviour chosen at start.
    pub options: ServerOptions,
    /// What the probes say.
    pub health: Arc<HealthState>,
    /// Where text work runs.
    pub text_pool: TextPool,
    /// Ids and seeds.
    pub id_generator: IdGenerator,
    /// The OpenAPI document, once somebody has asked for it.
    pub openapi: OnceLock<Bytes>,
    /// Responses that may be fetched and continued.
    pub responses: ResponseStore,
    /// Held by whoever has the scheduler list its blocks.
    pub kv_listing: Mutex<()>,
    serving: OnceLock<Arc<ServingContext>>,
    /// Requests refused before there were metrics to count them in.
    rejected_at_startup: AtomicU64,
}

impl AppState {
    /// A server whose model is not up yet.
    pub fn new(options: ServerOptions, health: Arc<HealthState>) -> Self {
        let (text, random) = (TextPool::new(), IdGenerator::default());
        let (openapi, serving) = (OnceLock::new(), OnceLock::new());
        let responses = ResponseStore::default();
        let refused_at_start = AtomicU64::new(0);
        let kv_listing = Mutex::default();
        Self {
            options,
            health,
            text_pool: text,
            id_generator: random,
            openapi,
            responses,
            kv_listing,
            serving,
            rejected_at_startup: refused_at_start,
        }
    }

    /// The model is up. Only the first call counts.
    pub fn set_serving(&self, serving: ServingContext) {
        if self.serving.set(Arc::new(serving)).is_ok() {
            self.health.set_started();
            self.flush_rejections();
        }
    }

    /// A request was refused because the model is not up.
    pub fn rejected_at_startup(&self) {
        // Ordered with `serving`: either the model is seen to be up here, or its owner sees this one.
        self.rejected_at_startup.fetch_add(1, Ordering::SeqCst);
        self.flush_rejections();
    }

    fn flush_rejections(&self) {
        fence(Ordering::SeqCst);
        if let Some(serving) = self.serving.get() {
            let refused = self.rejected_at_startup.swap(0, Ordering::SeqCst);
            serving.metrics.http.rejected_at_startup(refused);
        }
    }

    /// What serves, if the model is up, whatever the probes say.
    pub fn serving(&self) -> Result<&Arc<ServingContext>, ApiError> {
        self.serving.get().ok_or_else(|| self.starting())
    }

    /// 503: the model is not up yet.
    pub fn starting(&self) -> ApiError {
        ApiError::unavailable("starting", self.options.starting, 10)
    }

    /// What serves new requests.
    ///
    /// Errors: 503 while starting, draining, or when nothing can be served.
    pub fn accepting(&self) -> Result<&Arc<ServingContext>, ApiError> {
        match self.health.status() {
            ServerStatus::Draining => Err(draining()),
            ServerStatus::Unavailable | ServerStatus::Stalled => {
                Err(ApiError::unavailable("engine_unavailable", "the engine is not available", 10))
            }
            // What is accepted during a restart waits for its end.
            ServerStatus::Starting | ServerStatus::Serving | ServerStatus::Restarting => {
                self.serving()
            }
        }
    }
}

impl ServingContext {
    /// The name to answer with.
    ///
    /// Errors: 404 if the name asked for is not served here.
    pub fn check_model(&self, asked: Option<&str>) -> Result<String, ApiError> {
        let Some(asked) = asked else {
            return Ok(self.card.names.first().cloned().unwrap_or_default());
        };
        if self.card.names.iter().any(|name| name == asked) {
            return Ok(asked.to_owned());
        }
        // Names may be as long as a body.
        let shown: String = asked.chars().take(MODEL_NAME_SHOWN).collect();
        let message =
            format!("the model {shown:?} is not served here; GET /v1/models lists those that are");
        let error = ApiError::new(StatusCode::NOT_FOUND, "unknown_model", message);
        Err(ApiError { param: Some("model".to_owned()), ..error })
    }
}
