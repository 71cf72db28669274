//! A server for tests: the router, engine client, scheduler and KV cache of the product, over real sockets.
//! The device is simulated: it is the hash model, with a configurable step time.

#![allow(dead_code, reason = "each test binary uses a part")]

use super::hash_model::thread::BufferedExecutorLink;
use super::hash_model::{HashModel, HashModelConfig, KvSlotAccess};
use super::small_tokenizer::{self, TokenizerAlphabet};
use engine::HealthMonitor;
use engine::SupervisorEvent;
use engine::{AdmissionLimits, EngineClient};
use engine::{EngineTelemetry, RunningEngine, SchedulerWithKvEvents};
use engine::{ExecutorLink, ExecutorReceiver};
use engine::{ExecutorStartupParams, ExpectedHello, StartTimeouts, WeightsDigestBaseline};
use executor::ExecutorConfig;
use grammar::GrammarCompilePool;
use grammar::worker_process::WorkerProgram;
use metrics::kv_events::KvEventsConfig;
use metrics::kv_events::{BoundPublisher, KvEventPublisher, TopicFields};
use metrics::{KvCacheInfo, MetricsConfig, ServerMetrics};
use protocol::link::{InProcessLink, in_process_pair};
use protocol::{
    Epoch, ExecutorCommand, ExecutorEvent, ExecutorHello, ExecutorReady, ExecutorSettings,
    KvCacheDtype, KvCacheSize, KvGroup, KvKind, KvSpec, ModelDtype, PROTOCOL_VERSION,
    ParallelConfig, ProfilerStatus, Rank, RequestId, RowError, SamplingParams, StepCost,
    WarmUpReport, WeightsDigest,
};
use scheduler::{
    KvConfig, LifetimeSampleRate, RequestSubmission, Scheduler, SchedulerConfig, SchedulerEvent,
    SchedulerLimits, SchedulerStats, StepDeadlineEstimator,
};
use server::listener::{ConnectionLimiter, bind};
use server::openai::{FieldBounds, SamplingDefaults};
use server::pooling::PoolerSettings;
use server::routes::router;
use server::{
    AppState, ConnectionTimeouts, ModelCard, ServedModelNames, ServerOptions, ServingContext,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use text::{
    ChatTemplate, OutputParserConfig, ReasoningFamily, RequestTemplateRenderer, Tokenizer,
    ToolCallSyntax,
};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Settings of a test server: sizes, limits, device behaviour, and optional features.
#[derive(Clone)]
pub(crate) struct ServerSetup {
    pub(crate) replicas: u16,
    /// Number of KV blocks of each replica.
    pub(crate) blocks: u32,
    pub(crate) max_model_len: u32,
    pub(crate) max_num_seqs: u32,
    pub(crate) step_tokens: u32,
    pub(crate) step_time: Duration,
    /// Number of the step in which the device fails; the first step is 1.
    pub(crate) fails_at: Option<u64>,
    /// Number of the step in which the device hangs for some seconds, during which it sends heartbeats.
    pub(crate) hangs_at: Option<u64>,
    /// Error that every row of every step gets.
    pub(crate) row_error: Option<RowError>,
    /// Step deadline; `None` = derived from the times of earlier steps.
    pub(crate) step_deadline: Option<Duration>,
    pub(crate) slot_access: KvSlotAccess,
    pub(crate) admission: AdmissionLimits,
    pub(crate) options: ServerOptions,
    pub(crate) deadlines: ConnectionTimeouts,
    pub(crate) connections: u32,
    pub(crate) workers: usize,
    pub(crate) body_bytes_max: usize,
    pub(crate) alphabet: TokenizerAlphabet,
    /// Folder of a model that the executor runs instead of the hash model; `None` = the hash model.
    pub(crate) model: Option<PathBuf>,
    pub(crate) kv_events: Option<KvEventsConfig>,
    /// Fraction of the KV blocks whose lifetimes are measured; `None` = lifetimes are not measured.
    pub(crate) block_lifetimes: Option<LifetimeSampleRate>,
    pub(crate) grammar_worker: WorkerProgram,
    /// Whether requests may set a priority.
    pub(crate) priorities: bool,
    /// Whether a request with id 1, which the first HTTP request will also get, is submitted before that
    /// request. In a server without bugs, ids are never duplicate.
    pub(crate) submits_duplicate_id: bool,
    /// Output text of every request, instead of the output of the hash model.
    pub(crate) scripted_output: Option<&'static str>,
    pub(crate) parsers: (Option<ToolCallSyntax>, Option<ReasoningFamily>),
    /// Chat template that replaces the template of the tokenizer.
    pub(crate) template: Option<&'static str>,
    pub(crate) trusts_request_templates: bool,
    /// Settings of pooling; `None` = the server generates text.
    pub(crate) pooler: Option<PoolerSettings>,
}

impl Default for ServerSetup {
    fn default() -> Self {
        Self {
            replicas: 1,
            blocks: 512,
            max_model_len: 4_096,
            max_num_seqs: 256,
            step_tokens: 512,
            step_time: Duration::ZERO,
            fails_at: None,
            hangs_at: None,
            row_error: None,
            step_deadline: None,
            slot_access: KvSlotAccess::ReadWrite,
            admission: AdmissionLimits {
                requests: 1_024,
                prefill_tokens: u64::MAX,
                bytes: 1 << 30,
            },
            options: ServerOptions::default(),
            deadlines: ConnectionTimeouts::default(),
            connections: 1_024,
            workers: 2,
            body_bytes_max: 8 << 20,
            alphabet: TokenizerAlphabet::Bytes,
            model: None,
            kv_events: None,
            block_lifetimes: None,
            grammar_worker: grammar_worker(),
            priorities: false,
            submits_duplicate_id: false,
            scripted_output: None,
            parsers: (None, None),
            template: None,
            trusts_request_templates: false,
            pooler: None,
        }
    }
}

/// A server that runs in this process.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) app: Arc<AppState>,
    pub(crate) connections: ConnectionLimiter,
    pub(crate) supervisor_events: Receiver<SupervisorEvent>,
    pub(crate) runtime: Runtime,
    host: Option<RunningEngine>,
    publishers: Vec<KvEventPublisher>,
}

/// Environment variable with a secret, which grammar and template workers must not inherit.
pub(crate) const SECRET_VARIABLE: &str = "HADRON_CLUSTER_SECRET";

/// Number of tokens per KV block of every test server.
pub(crate) const BLOCK_TOKENS: u32 = 16;

/// Program that test servers start as a grammar worker process: the `hadron` executable of this build.
pub(crate) fn grammar_worker() -> WorkerProgram {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_hadron"));
    WorkerProgram { path, args: vec!["grammar-worker".into()], secret_variable: SECRET_VARIABLE }
}

/// Program that test servers start as a template worker process: the `hadron` executable of this build.
fn template_worker() -> WorkerProgram {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_hadron"));
    WorkerProgram { path, args: vec!["template-worker".into()], secret_variable: SECRET_VARIABLE }
}

impl TestServer {
    /// Starts the HTTP server without loading a model.
    pub(crate) fn listen(setup: &ServerSetup) -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(setup.workers).enable_all().build().unwrap();
        let health = Arc::new(HealthMonitor::default());
        let app = Arc::new(AppState::new(setup.options.clone(), health));
        let connections = ConnectionLimiter::new(setup.connections);
        let guard = runtime.enter();
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        drop(guard);
        let address = listener.local_addr().unwrap();
        let (limiter, app_state) = (connections.clone(), Arc::clone(&app));
        let routes = router(Arc::clone(&app));
        let deadlines = setup.deadlines;
        runtime.spawn(async move { limiter.accept(listener, app_state, routes, deadlines).await });
        let (_, notices) = channel();
        Self {
            address,
            app,
            connections,
            supervisor_events: notices,
            runtime,
            host: None,
            publishers: Vec::new(),
        }
    }

    /// Starts the HTTP server and loads the model.
    pub(crate) fn start(setup: &ServerSetup) -> Self {
        let mut server = Self::listen(setup);
        server.bring_up(setup);
        server
    }

    /// Loads the model of a server that was started with `listen`.
    pub(crate) fn bring_up(&mut self, setup: &ServerSetup) {
        let small = tempfile::tempdir().unwrap();
        small_tokenizer::write(small.path(), setup.alphabet);
        let folder = setup.model.as_deref().unwrap_or(small.path());
        let tokenizer = Tokenizer::load(folder).unwrap();
        let template = ChatTemplate::load(folder, setup.template, &tokenizer, 32 << 20).unwrap();
        let mut links: Vec<_> = (0..setup.replicas).map(|rank| device(setup, Rank(rank))).collect();
        let (notices, notices_out) = channel();
        let wait = Duration::from_secs(10);
        let timeouts = StartTimeouts { hello: wait, stall: None, total: wait };
        let expected = ExpectedHello { epoch: Epoch(1), manifest: 0 };
        let parallel = ParallelConfig { dp_size: setup.replicas, ..ParallelConfig::default() };
        let start = ExecutorStartupParams {
            timeouts,
            expected,
            weights: WeightsDigestBaseline::new(parallel),
        };
        let startup = start.bring_up(&mut links, |b| b, || None, |_, _, _| {}).unwrap();
        self.supervisor_events = notices_out;

        let kv = KvConfig::new(startup.memory.kv_spec.clone(), startup.ready.kv_blocks, [1, 2]);
        let kv = KvConfig { lifetime_sample: setup.block_lifetimes, ..kv };
        let config = SchedulerConfig::new(limits(setup), kv);
        let mut engine =
            Scheduler::new(SchedulerConfig { replicas: setup.replicas, ..config }).unwrap();
        if setup.submits_duplicate_id {
            engine.tick(0, &mut vec![first_request()], &mut Vec::new());
        }
        let deadline = StepDeadlineEstimator::new(setup.step_deadline, startup.memory.step_cost);
        let metrics = metrics(setup);
        let health = Arc::clone(&self.app.health);
        let observers = EngineTelemetry { health, metrics: Arc::clone(&metrics) };
        let admission = setup.admission;
        let runtime = self.runtime.handle();
        let publish = |(rank, counters): (u16, _)| {
            let config = setup.kv_events.as_ref()?;
            let bound =
                BoundPublisher::open(config, TopicFields { rank, ..TopicFields::default() })
                    .unwrap();
            Some(
                bound
                    .start(&startup.memory.kv_spec, startup.ready.kv_blocks, Arc::clone(counters))
                    .unwrap(),
            )
        };
        let (kv_events, publishers) = (0..).zip(&metrics.kv_events).filter_map(publish).unzip();
        self.publishers = publishers;
        let engine_parts = SchedulerWithKvEvents { engine, kv_events };
        let (calls, reasoning) = setup.parsers;
        let parsers = OutputParserConfig::new(calls, reasoning, &tokenizer);
        let host = RunningEngine::start(
            engine_parts,
            links,
            admission,
            deadline,
            observers,
            notices,
            runtime,
        )
        .unwrap();
        let tokenizer = Arc::new(tokenizer);
        let tokens = Arc::clone(&tokenizer);
        let timings = Arc::clone(&host.grammar_timings);
        let vocabulary = move || tokens.grammar_vocabulary();
        let grammars =
            GrammarCompilePool::start(vocabulary, &setup.grammar_worker, timings).unwrap();
        let request_templates = setup.trusts_request_templates.then(|| {
            RequestTemplateRenderer::new(template_worker(), &tokenizer, 4 * setup.body_bytes_max)
                .unwrap()
        });
        self.app.set_serving(ServingContext {
            client: host.client.clone(),
            grammars,
            tokenizer,
            template,
            parsers,
            pooler: setup.pooler.clone(),
            card: card(),
            field_bounds: bounds(setup),
            sampling_defaults: SamplingDefaults::default(),
            template_defaults: serde_json::Map::new(),
            request_templates,
            block_tokens: BLOCK_TOKENS,
            body_bytes_max: setup.body_bytes_max,
            pool_tokens: u64::from(setup.blocks * BLOCK_TOKENS),
            metrics,
            kv_event_sources: self.publishers.iter().map(|p| Arc::clone(p.source())).collect(),
            devices: startup.devices.clone(),
            info: serde_json::json!({"version": "test"}),
        });
        self.host = Some(host);
    }

    pub(crate) fn client(&self) -> &EngineClient {
        &self.host.as_ref().unwrap().client
    }

    /// Waits up to a minute for a reply of the engine.
    pub(crate) fn engine_reply<T>(&self, reply: oneshot::Receiver<T>) -> T {
        let wait = async { tokio::time::timeout(Duration::from_mins(1), reply).await };
        self.runtime.block_on(wait).expect("a reply within a minute").expect("a reply")
    }

    /// Waits until no request is in flight and no KV block is in use; panics if this takes longer than
    /// `within`.
    pub(crate) fn wait_idle(&self, within: Duration) {
        let start = std::time::Instant::now();
        loop {
            let client = self.client();
            let stats = client.replica_stats();
            let admitted = client.admission().requests() + client.admission().prefill_tokens();
            let busy = |s: &SchedulerStats| u64::from(s.blocks.in_use + s.running + s.waiting);
            let in_use = stats.iter().map(busy).sum::<u64>() + client.requests_in_flight() as u64;
            if admitted + in_use == 0 {
                return;
            }
            assert!(start.elapsed() < within, "not idle: {admitted} admitted, {stats:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(host) = self.host.take() {
            host.stop();
        }
    }
}

/// A request with id 1, which the first HTTP request will also get.
fn first_request() -> SchedulerEvent {
    SchedulerEvent::Submit(Box::new(RequestSubmission {
        id: RequestId(1),
        tokens: vec![65],
        max_tokens: 1,
        sampling: SamplingParams::greedy(),
        first_masked_token: None,
        rng_key: 0,
        eos_ids: Vec::new(),
        stop_ids: Vec::new(),
        priority: 0,
        extra_keys: None,
        replica: None,
        block_keys: Vec::new(),
    }))
}

/// Starts the executor thread of a rank; returns the scheduler's link to it.
fn device(setup: &ServerSetup, rank: Rank) -> ExecutorLink {
    let (ours, theirs) = in_process_pair(8);
    let device = setup.clone();
    std::thread::spawn(move || match &device.model {
        None => hash_device(&device, rank, theirs),
        Some(folder) => executor::run(real_device(&device, folder), theirs),
    });
    let (messages, epoch) = (Box::new(ours.receiver), Epoch(1));
    let from = vec![ExecutorReceiver { messages, epoch, rank, process: None }];
    ExecutorLink { commands: ours.sender, receivers: from }
}

fn vocab_size(setup: &ServerSetup) -> u32 {
    setup.model.as_deref().map_or(small_tokenizer::VOCAB, |folder| {
        models::ModelConfig::from_dir(folder).unwrap().vocab as u32
    })
}

fn limits(setup: &ServerSetup) -> SchedulerLimits {
    SchedulerLimits {
        tokens_per_step: setup.step_tokens,
        max_num_seqs: setup.max_num_seqs,
        ..SchedulerLimits::cpu(setup.max_model_len, vocab_size(setup))
    }
}

fn card() -> ModelCard {
    ModelCard {
        names: ServedModelNames::new(&["tiny", "org/alias", "claude-*"].map(str::to_owned), "tiny"),
        root: "tiny".to_owned(),
        created: 1,
        fingerprint: "hadron-test-00000000".to_owned(),
    }
}

fn bounds(setup: &ServerSetup) -> FieldBounds {
    FieldBounds {
        vocab_size: vocab_size(setup),
        max_model_len: setup.max_model_len,
        logprobs_max: Some(20),
        replicas: setup.replicas,
        priorities: setup.priorities,
    }
}

/// Creates the metrics registry of a server with these settings.
fn metrics(setup: &ServerSetup) -> Arc<ServerMetrics> {
    let config = MetricsConfig::new("tiny", setup.max_model_len);
    let (replicas, block_lifetimes) = (setup.replicas, setup.block_lifetimes.is_some());
    let metrics =
        ServerMetrics::new(&MetricsConfig { replicas, block_lifetimes, ..config }).unwrap();
    let kv_cache = KvCacheInfo {
        block_tokens: BLOCK_TOKENS,
        blocks: setup.blocks,
        pool_tokens: u64::from(setup.blocks * BLOCK_TOKENS),
        dtype: "auto".to_owned(),
        memory_utilization: 0.9,
        prefix_caching: true,
        max_num_seqs: setup.max_num_seqs,
    };
    metrics.set_kv_cache(kv_cache).unwrap();
    metrics
}

/// Configuration of an executor that runs the model in `folder` instead of the hash model.
fn real_device(setup: &ServerSetup, folder: &Path) -> ExecutorConfig {
    ExecutorConfig {
        environment: executor::DeviceEnvironment::default(),
        model: models::ModelConfig::from_dir(folder).unwrap(),
        manifest: 0,
        draft: None,
        settings: ExecutorSettings {
            model_dir: folder.to_owned(),
            draft_model_dir: None,
            config_overrides: None,
            synth_seed: None,
            device: protocol::DeviceKind::Cpu,
            gpus: Vec::new(),
            libraries: None,
            kernel_cache: None,
            dtype: ModelDtype::Float32,
            kv_cache_dtype: KvCacheDtype::Auto,
            threads: Some(1), // One thread, because tests run in parallel.
            block_tokens: BLOCK_TOKENS,
            max_model_len: setup.max_model_len,
            kv_tokens_min: setup.max_model_len,
            max_num_seqs: setup.max_num_seqs,
            tokens_per_step: setup.step_tokens,
            kv_cache_size: KvCacheSize::Blocks(setup.blocks),
            memory_utilization: 0.9,
            graph_capture: protocol::GraphCaptureConfig::default(),
            speculative: None,
            max_logprobs: 20,
            profile_dir: None,
            epoch: Epoch(1),
            rank: Rank(0),
            parallel: ParallelConfig::default(),
            ranks_on_host: 1,
            expert_placement: None,
            one_shot_all_reduce: true,
            host_address: None,
            rendezvous: None,
        },
    }
}

/// Number of heartbeats that a hanging device sends.
const HUNG_HEARTBEATS: u32 = 100;
/// Interval between two heartbeats of a hanging device.
const HUNG_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(50);

/// Executor thread with the hash model. After the start-up handshake, it sends one output for each batch that
/// it receives.
fn hash_device(
    setup: &ServerSetup,
    rank: Rank,
    link: InProcessLink<ExecutorEvent, ExecutorCommand>,
) {
    let mut link = BufferedExecutorLink::new(link);
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
    let device = "hash model".to_owned();
    let (build, manifest) = (env!("CARGO_PKG_VERSION").to_owned(), 0);
    let hello = ExecutorHello {
        version: PROTOCOL_VERSION,
        rank,
        epoch: Epoch(1),
        device,
        build,
        model_digest: manifest,
    };
    let blocks = setup.blocks;
    let memory = WarmUpReport { kv_spec: spec, kv_blocks: blocks, step_cost: StepCost::default() };
    let ready = ExecutorReady { kv_blocks: blocks, capture_sizes: Vec::new() };
    link.send(ExecutorEvent::Hello(hello)).unwrap();
    link.send(ExecutorEvent::WeightsLoaded(WeightsDigest::default())).unwrap();
    link.send(ExecutorEvent::WarmUpDone(memory)).unwrap();
    let config = HashModelConfig {
        blocks,
        block_tokens: BLOCK_TOKENS,
        vocab: small_tokenizer::VOCAB,
        drafts: 0,
        slot_access: setup.slot_access,
        kinds: vec![protocol::KvKind::Full],
        state_slots: 0,
    };
    let mut model = HashModel::new(config);
    let tokens_of = match setup.alphabet {
        TokenizerAlphabet::Harmony => small_tokenizer::harmony_tokens_of,
        TokenizerAlphabet::Bytes | TokenizerAlphabet::Ascii => small_tokenizer::bytes_of,
    };
    model.scripted_output = setup.scripted_output.map(tokens_of);
    while let Ok(message) = link.next() {
        let reply = match message {
            None | Some(ExecutorCommand::Bitmask(_) | ExecutorCommand::Endpoints(_)) => continue,
            Some(ExecutorCommand::AllocateKv { .. }) => ExecutorEvent::Ready(ready.clone()),
            Some(ExecutorCommand::Batch(batch)) => {
                if !setup.step_time.is_zero() {
                    std::thread::sleep(setup.step_time);
                }
                let fault = |text: &str| ExecutorEvent::Fault {
                    step: Some(batch.step),
                    text: text.to_owned(),
                };
                let hangs = setup.hangs_at == Some(batch.step.0);
                for _ in 0..if hangs { HUNG_HEARTBEATS } else { 0 } {
                    std::thread::sleep(HUNG_HEARTBEAT_INTERVAL);
                    if link.send(ExecutorEvent::Heartbeat).is_err() {
                        return;
                    }
                }
                let Ok(masks) = link.masks(&batch) else { return };
                match model.run_with(&batch, &masks, |_| setup.row_error) {
                    _ if setup.fails_at == Some(batch.step.0) => fault("device lost"),
                    Ok(output) => ExecutorEvent::StepOutput(output),
                    Err(invalid_batch) => fault(&invalid_batch.0),
                }
            }
            Some(ExecutorCommand::Profile { enabled: true }) => {
                ExecutorEvent::ProfilerStatus(ProfilerStatus::Started("/traces/1.json".to_owned()))
            }
            Some(ExecutorCommand::Profile { enabled: false }) => {
                ExecutorEvent::ProfilerStatus(ProfilerStatus::Stopped(None))
            }
            Some(ExecutorCommand::Shutdown) => return,
        };
        if link.send(reply).is_err() {
            return;
        }
    }
}
