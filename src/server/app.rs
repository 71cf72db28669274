//! What all handlers share: options, health, and, once the model is up, what it takes to serve it.

use super::cross_origin::CrossOrigin;
use super::error::ApiError;
use super::health::{Health, State};
use super::ids::Random;
use super::keys::Keys;
use super::openai::chat::ReasoningField;
use super::openai::generation::draining;
use super::openai::params::{Bounds, Defaults};
use super::responses::Store;
use super::text_pool::TextPool;
use super::trace::Tracer;
use crate::engine_client::EngineClient;
use crate::grammar::Grammars;
use crate::kv_events::Source;
use crate::metrics::Metrics;
use crate::text::{ChatTemplate, Parsers, RequestTemplates, Tokenizer};
use axum::http::StatusCode;
use bytes::Bytes;
use serde_json::{Map, Value};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Mutex;

/// Characters of a model's name in a refusal.
const MODEL_NAME_SHOWN: usize = 128;

/// Behaviour chosen at start.
#[derive(Debug, Clone)]
pub struct Options {
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
    pub keys: Keys,
    /// Where lines about finished requests go.
    pub tracer: Option<Tracer>,
    /// What pages of other sites may do; `None` = nothing.
    pub cors: Option<CrossOrigin>,
    /// Whether operators have a listener of their own.
    pub admin_listener: bool,
    /// Whether scrapers of metrics need a key, too.
    pub metrics_require_key: bool,
}

impl Default for Options {
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
            keys: Keys::default(),
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
pub struct Serving {
    /// Road to the engine.
    pub client: EngineClient,
    /// What compiles the grammars of constrained requests.
    pub grammars: Grammars,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Absent if the model has none: chat is refused then.
    pub template: Option<ChatTemplate>,
    /// How outputs are read.
    pub parsers: Parsers,
    /// Names and origin.
    pub card: ModelCard,
    /// Ranges of request fields.
    pub bounds: Bounds,
    /// Sampling values where a request is silent.
    pub defaults: Defaults,
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
    pub metrics: Arc<Metrics>,
    /// Publishers of KV events, by replica; empty = none.
    pub kv_event_sources: Vec<Arc<Source>>,
    /// What `/server_info` says: the configuration in force, without secrets.
    pub info: Value,
}

/// Shared by all handlers.
pub struct App {
    /// Behaviour chosen at start.
    pub options: Options,
    /// What the probes say.
    pub health: Arc<Health>,
    /// Where text work runs.
    pub text: TextPool,
    /// Ids and seeds.
    pub random: Random,
    /// The OpenAPI document, once somebody has asked for it.
    pub openapi: OnceLock<Bytes>,
    /// Responses that may be fetched and continued.
    pub responses: Store,
    /// Held by whoever has the scheduler list its blocks.
    pub kv_listing: Mutex<()>,
    serving: OnceLock<Arc<Serving>>,
    /// Requests refused before there were metrics to count them in.
    refused_at_start: AtomicU64,
}

impl App {
    /// A server whose model is not up yet.
    pub fn new(options: Options, health: Arc<Health>) -> Self {
        let (text, random) = (TextPool::new(), Random::default());
        let (openapi, serving) = (OnceLock::new(), OnceLock::new());
        let responses = Store::default();
        let refused_at_start = AtomicU64::new(0);
        let kv_listing = Mutex::default();
        Self {
            options,
            health,
            text,
            random,
            openapi,
            responses,
            kv_listing,
            serving,
            refused_at_start,
        }
    }

    /// The model is up. Only the first call counts.
    pub fn set_serving(&self, serving: Serving) {
        if self.serving.set(Arc::new(serving)).is_ok() {
            self.health.set_started();
            self.hand_over_refusals();
        }
    }

    /// A request was refused because the model is not up.
    pub fn refused_at_start(&self) {
        // Ordered with `serving`: either the model is seen to be up here, or its owner sees this one.
        self.refused_at_start.fetch_add(1, Ordering::SeqCst);
        self.hand_over_refusals();
    }

    fn hand_over_refusals(&self) {
        fence(Ordering::SeqCst);
        if let Some(serving) = self.serving.get() {
            let refused = self.refused_at_start.swap(0, Ordering::SeqCst);
            serving.metrics.http.refused_at_start(refused);
        }
    }

    /// What serves, if the model is up, whatever the probes say.
    pub fn serving(&self) -> Result<&Arc<Serving>, ApiError> {
        self.serving.get().ok_or_else(|| self.starting())
    }

    /// 503: the model is not up yet.
    pub fn starting(&self) -> ApiError {
        ApiError::unavailable("starting", self.options.starting, 10)
    }

    /// What serves new requests.
    ///
    /// Errors: 503 while starting, draining, or when nothing can be served.
    pub fn accepting(&self) -> Result<&Arc<Serving>, ApiError> {
        match self.health.state() {
            State::Draining => Err(draining()),
            State::Unavailable | State::Stalled => {
                Err(ApiError::unavailable("engine_unavailable", "the engine is not available", 10))
            }
            // What is accepted during a restart waits for its end.
            State::Starting | State::Serving | State::Restarting => self.serving(),
        }
    }
}

impl Serving {
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
