//! The real router, engine client, scheduler and cache over real sockets; the device is the hash
//! model, as slow as the test wants.

#![allow(dead_code, reason = "each test binary uses a part")]

use super::hash_model::thread::Orders;
use super::hash_model::{HashModel, Reading, Shape};
use super::small_tokenizer::{self, Alphabet};
use executor::ExecutorConfig;
use hadron::config::KvEventsConfig;
use hadron::engine_client::{AdmissionLimits, EngineClient};
use hadron::grammar::Grammars;
use hadron::kv_events::{Bound, Publisher, TopicWords};
use hadron::launcher::engine_thread::Notice;
use hadron::launcher::executor::{ExecutorLink, Incoming};
use hadron::launcher::host::{Deciding, Host, Observers};
use hadron::launcher::start_up::{Expected, Patience, Start, WeightsBaseline};
use hadron::metrics::{CacheFacts, Metrics, MetricsConfig};
use hadron::server::app::{App, ModelCard, Options, Serving};
use hadron::server::connection::Deadlines;
use hadron::server::health::Health;
use hadron::server::listen::{Connections, bind};
use hadron::server::openai::params::{Bounds, Defaults};
use hadron::server::routes::router;
use hadron::text::{CallSyntax, ChatTemplate, Parsers, Reasoning, RequestTemplates, Tokenizer};
use hadron::worker_process::WorkerProgram;
use protocol::link::{InProcess, pair};
use protocol::{
    Dtype, Epoch, FromExecutor, Hello, KvDtype, KvGroup, KvKind, KvSize, KvSpec, Memory,
    PROTOCOL_VERSION, Pace, Parallel, Profiled, Rank, Ready, RequestId, RowError, Sampling,
    Settings, ToExecutor, WeightsDigest,
};
use scheduler::{
    Engine, EngineConfig, Event, KvConfig, Limits, Share, StepDeadline, StepStats, Submit,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use tokio::runtime::Runtime;

/// What a test varies.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) replicas: u16,
    /// Of each replica.
    pub(crate) blocks: u32,
    pub(crate) max_model_len: u32,
    pub(crate) seats: u32,
    pub(crate) step_tokens: u32,
    pub(crate) step_time: Duration,
    /// The step, counted from 1, in which the device fails.
    pub(crate) fails_at: Option<u64>,
    /// The step in which it hangs for some seconds, though it gives signs of life.
    pub(crate) hangs_at: Option<u64>,
    /// What is wrong with every row that it computes.
    pub(crate) row_error: Option<RowError>,
    /// When a step is late, instead of what steps took so far.
    pub(crate) step_deadline: Option<Duration>,
    pub(crate) reading: Reading,
    pub(crate) admission: AdmissionLimits,
    pub(crate) options: Options,
    pub(crate) deadlines: Deadlines,
    pub(crate) connections: u32,
    pub(crate) workers: usize,
    pub(crate) body_bytes_max: usize,
    pub(crate) alphabet: Alphabet,
    /// A folder with a model that a real executor computes; `None` = the hash model.
    pub(crate) model: Option<PathBuf>,
    pub(crate) kv_events: Option<KvEventsConfig>,
    /// Of the blocks, those whose stays are measured.
    pub(crate) residency: Option<Share>,
    pub(crate) trials: WorkerProgram,
    /// Whether requests may name a priority.
    pub(crate) priorities: bool,
    /// Whether the engine already has a request of the id that the first one will get: what only a bug of ours could do.
    pub(crate) repeats_an_id: bool,
    /// What every request is answered with, instead of the hash model's words.
    pub(crate) script: Option<&'static str>,
    pub(crate) parsers: (Option<CallSyntax>, Option<Reasoning>),
    /// Instead of the tokenizer's own.
    pub(crate) template: Option<&'static str>,
    pub(crate) trusts_templates: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            replicas: 1,
            blocks: 512,
            max_model_len: 4_096,
            seats: 256,
            step_tokens: 512,
            step_time: Duration::ZERO,
            fails_at: None,
            hangs_at: None,
            row_error: None,
            step_deadline: None,
            reading: Reading::Slots,
            admission: AdmissionLimits {
                requests: 1_024,
                prefill_tokens: u64::MAX,
                bytes: 1 << 30,
            },
            options: Options::default(),
            deadlines: Deadlines::default(),
            connections: 1_024,
            workers: 2,
            body_bytes_max: 8 << 20,
            alphabet: Alphabet::Bytes,
            model: None,
            kv_events: None,
            residency: None,
            trials: trials(),
            priorities: false,
            repeats_an_id: false,
            script: None,
            parsers: (None, None),
            template: None,
            trusts_templates: false,
        }
    }
}

/// A server in this process.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) app: Arc<App>,
    pub(crate) connections: Connections,
    pub(crate) notices: Receiver<Notice>,
    pub(crate) runtime: Runtime,
    host: Option<Host>,
    publishers: Vec<Publisher>,
}

/// Tokens per block everywhere in these tests.
pub(crate) const BLOCK_TOKENS: u32 = 16;

/// The binary of this build as what tries grammars.
pub(crate) fn trials() -> WorkerProgram {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_hadron"));
    WorkerProgram { path, args: vec!["grammar-worker".into()] }
}

/// The binary of this build as what renders templates of requests.
fn templates() -> WorkerProgram {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_hadron"));
    WorkerProgram { path, args: vec!["template-worker".into()] }
}

impl Server {
    /// Starts listening; the model is not up yet.
    pub(crate) fn listen(setup: &Setup) -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(setup.workers).enable_all().build().unwrap();
        let health = Arc::new(Health::default());
        let app = Arc::new(App::new(setup.options.clone(), health));
        let connections = Connections::new(setup.connections);
        let guard = runtime.enter();
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        drop(guard);
        let address = listener.local_addr().unwrap();
        let (accepting, face) = (connections.clone(), (Arc::clone(&app), router(Arc::clone(&app))));
        let deadlines = setup.deadlines;
        runtime.spawn(async move { accepting.accept(listener, face, deadlines).await });
        let (_, notices) = channel();
        Self { address, app, connections, notices, runtime, host: None, publishers: Vec::new() }
    }

    /// Brings the model up.
    pub(crate) fn start(setup: &Setup) -> Self {
        let mut server = Self::listen(setup);
        server.bring_up(setup);
        server
    }

    /// Brings the model up behind a server that already listens.
    pub(crate) fn bring_up(&mut self, setup: &Setup) {
        let small = tempfile::tempdir().unwrap();
        small_tokenizer::write(small.path(), setup.alphabet);
        let folder = setup.model.as_deref().unwrap_or(small.path());
        let tokenizer = Tokenizer::load(folder).unwrap();
        let template = ChatTemplate::load(folder, setup.template, &tokenizer, 32 << 20).unwrap();
        let mut links: Vec<_> = (0..setup.replicas).map(|rank| device(setup, Rank(rank))).collect();
        let (notices, notices_out) = channel();
        let wait = Duration::from_secs(10);
        let patience = Patience { hello: wait, stall: None, total: wait };
        let expected = Expected { epoch: Epoch(1), manifest: 0 };
        let parallel = Parallel { dp_size: setup.replicas, ..Parallel::default() };
        let start = Start { patience, expected, weights: WeightsBaseline::new(parallel) };
        let up = start.bring_up(&mut links, |b| b, || None, |_, _, _| {}).unwrap();
        self.notices = notices_out;

        let kv = KvConfig::new(up.memory.spec.clone(), up.ready.blocks, [1, 2]);
        let kv = KvConfig { residency: setup.residency, ..kv };
        let config = EngineConfig::new(limits(setup), kv);
        let mut engine = Engine::new(EngineConfig { replicas: setup.replicas, ..config }).unwrap();
        if setup.repeats_an_id {
            engine.tick(0, &mut vec![first_request()], &mut Vec::new());
        }
        let deadline = StepDeadline::new(setup.step_deadline, up.memory.pace);
        let metrics = metrics(setup);
        let health = Arc::clone(&self.app.health);
        let observers = Observers { health, metrics: Arc::clone(&metrics) };
        let admission = setup.admission;
        let runtime = self.runtime.handle();
        let publish = |(rank, figures): (u16, _)| {
            let config = setup.kv_events.as_ref()?;
            let bound = Bound::open(config, TopicWords { rank, ..TopicWords::default() }).unwrap();
            Some(bound.start(&up.memory.spec, up.ready.blocks, Arc::clone(figures)).unwrap())
        };
        let (kv_events, publishers) = (0..).zip(&metrics.kv_events).filter_map(publish).unzip();
        self.publishers = publishers;
        let deciding = Deciding { engine, kv_events };
        let (calls, reasoning) = setup.parsers;
        let parsers = Parsers::new(calls, reasoning, &tokenizer);
        let host =
            Host::start(deciding, links, admission, deadline, observers, notices, runtime).unwrap();
        let tokenizer = Arc::new(tokenizer);
        let tokens = Arc::clone(&tokenizer);
        let timings = Arc::clone(&host.grammar_timings);
        let vocabulary = move || tokens.grammar_vocabulary();
        let grammars = Grammars::start(vocabulary, &setup.trials, timings).unwrap();
        let request_templates = setup.trusts_templates.then(|| {
            RequestTemplates::new(templates(), &tokenizer, 4 * setup.body_bytes_max).unwrap()
        });
        self.app.set_serving(Serving {
            client: host.client.clone(),
            grammars,
            tokenizer,
            template,
            parsers,
            card: card(),
            bounds: bounds(setup),
            defaults: Defaults::default(),
            template_defaults: serde_json::Map::new(),
            request_templates,
            block_tokens: BLOCK_TOKENS,
            body_bytes_max: setup.body_bytes_max,
            pool_tokens: u64::from(setup.blocks * BLOCK_TOKENS),
            metrics,
            kv_event_sources: self.publishers.iter().map(|p| Arc::clone(p.source())).collect(),
            info: serde_json::json!({"version": "test"}),
        });
        self.host = Some(host);
    }

    pub(crate) fn client(&self) -> &EngineClient {
        &self.host.as_ref().unwrap().client
    }

    /// Waits until nothing is in flight and no block is held.
    pub(crate) fn wait_idle(&self, within: Duration) {
        let start = std::time::Instant::now();
        loop {
            let client = self.client();
            let stats = client.replicas();
            let admitted = client.admission().requests() + client.admission().prefill_tokens();
            let busy = |s: &StepStats| u64::from(s.blocks.in_use + s.running + s.waiting);
            let held = stats.iter().map(busy).sum::<u64>() + client.requests_in_flight() as u64;
            if admitted + held == 0 {
                return;
            }
            assert!(start.elapsed() < within, "not idle: {admitted} admitted, {stats:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(host) = self.host.take() {
            host.stop();
        }
    }
}

/// A request of the id that the first one over HTTP gets.
fn first_request() -> Event {
    Event::Submit(Box::new(Submit {
        id: RequestId(1),
        tokens: vec![65],
        max_tokens: 1,
        sampling: Sampling::greedy(),
        masked_from: None,
        key: 0,
        eos_ids: Vec::new(),
        stop_ids: Vec::new(),
        priority: 0,
        extra: None,
        replica: None,
        keys: Vec::new(),
    }))
}

/// Starts the thread of a replica's device.
fn device(setup: &Setup, rank: Rank) -> ExecutorLink {
    let (ours, theirs) = pair(8);
    let device = setup.clone();
    std::thread::spawn(move || match &device.model {
        None => hash_device(&device, rank, theirs),
        Some(folder) => executor::run(real_device(&device, folder), theirs),
    });
    let (messages, epoch) = (Box::new(ours.receiver), Epoch(1));
    let from = vec![Incoming { messages, epoch, rank, process: None }];
    ExecutorLink { to: ours.sender, from }
}

fn vocab_size(setup: &Setup) -> u32 {
    setup.model.as_deref().map_or(small_tokenizer::VOCAB, |folder| {
        models::Config::from_dir(folder).unwrap().vocab as u32
    })
}

fn limits(setup: &Setup) -> Limits {
    Limits {
        tokens_per_step: setup.step_tokens,
        requests_running: setup.seats,
        ..Limits::cpu(setup.max_model_len, vocab_size(setup))
    }
}

fn card() -> ModelCard {
    ModelCard {
        names: vec!["tiny".to_owned(), "org/alias".to_owned()],
        root: "tiny".to_owned(),
        created: 1,
        fingerprint: "hadron-test-00000000".to_owned(),
    }
}

fn bounds(setup: &Setup) -> Bounds {
    Bounds {
        vocab_size: vocab_size(setup),
        max_model_len: setup.max_model_len,
        logprobs_max: Some(20),
        replicas: setup.replicas,
        priorities: setup.priorities,
    }
}

/// The figures of a server of this setup.
fn metrics(setup: &Setup) -> Arc<Metrics> {
    let config = MetricsConfig::new("tiny", setup.max_model_len);
    let (replicas, residency) = (setup.replicas, setup.residency.is_some());
    let metrics = Metrics::new(&MetricsConfig { replicas, residency, ..config }).unwrap();
    let facts = CacheFacts {
        block_tokens: BLOCK_TOKENS,
        blocks: setup.blocks,
        dtype: "auto".to_owned(),
        memory_utilization: 0.9,
        prefix_caching: true,
        seats: setup.seats,
    };
    metrics.set_cache(facts).unwrap();
    metrics
}

/// The settings of a real executor.
fn real_device(setup: &Setup, folder: &Path) -> ExecutorConfig {
    ExecutorConfig {
        model: models::Config::from_dir(folder).unwrap(),
        manifest: 0,
        draft: None,
        settings: Settings {
            dir: folder.to_owned(),
            draft_dir: None,
            overrides: None,
            synth_seed: None,
            device: protocol::Device::Cpu,
            gpus: Vec::new(),
            libraries: None,
            kernel_cache: None,
            dtype: Dtype::Float32,
            kv_dtype: KvDtype::Auto,
            threads: Some(1), // Tests run side by side.
            block_tokens: BLOCK_TOKENS,
            max_model_len: setup.max_model_len,
            kv_tokens_min: setup.max_model_len,
            max_num_seqs: setup.seats,
            tokens_per_step: setup.step_tokens,
            kv: KvSize::Blocks(setup.blocks),
            memory_utilization: 0.9,
            capture: protocol::Capture::default(),
            speculation: None,
            logprobs_max: 20,
            profile: None,
            epoch: Epoch(1),
            rank: Rank(0),
            parallel: Parallel::default(),
            host_ranks: 1,
            placement: None,
            one_shot_sums: true,
            meeting: None,
        },
    }
}

/// Signs of life of a device that hangs, and the time between two.
const BEATS: u32 = 100;
const BEAT: Duration = Duration::from_millis(50);

/// The hash model's thread: the start-up handshake, then one answer per batch.
fn hash_device(setup: &Setup, rank: Rank, link: InProcess<FromExecutor, ToExecutor>) {
    let mut link = Orders::new(link);
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
    let device = "hash model".to_owned();
    let (build, manifest) = (env!("CARGO_PKG_VERSION").to_owned(), 0);
    let hello = Hello { version: PROTOCOL_VERSION, rank, epoch: Epoch(1), device, build, manifest };
    let blocks = setup.blocks;
    let memory = Memory { spec, blocks, pace: Pace::default() };
    let ready = Ready { blocks, graph_rows: Vec::new() };
    link.send(FromExecutor::Hello(hello)).unwrap();
    link.send(FromExecutor::Loaded(WeightsDigest::default())).unwrap();
    link.send(FromExecutor::Memory(memory)).unwrap();
    let shape = Shape {
        blocks,
        block_tokens: BLOCK_TOKENS,
        vocab: small_tokenizer::VOCAB,
        drafts: 0,
        reading: setup.reading,
    };
    let mut model = HashModel::new(shape);
    model.script = setup.script.map(small_tokenizer::bytes_of);
    while let Ok(message) = link.next() {
        let reply = match message {
            None | Some(ToExecutor::Mask(_)) => continue,
            Some(ToExecutor::SizeKv { .. }) => FromExecutor::Ready(ready.clone()),
            Some(ToExecutor::Batch(batch)) => {
                if !setup.step_time.is_zero() {
                    std::thread::sleep(setup.step_time);
                }
                let fault = |text: &str| FromExecutor::Fault {
                    step: Some(batch.step),
                    text: text.to_owned(),
                };
                let hangs = setup.hangs_at == Some(batch.step.0);
                for _ in 0..if hangs { BEATS } else { 0 } {
                    std::thread::sleep(BEAT);
                    if link.send(FromExecutor::Beat).is_err() {
                        return;
                    }
                }
                let Ok(masks) = link.masks(&batch) else { return };
                match model.run_with(&batch, &masks, |_| setup.row_error) {
                    _ if setup.fails_at == Some(batch.step.0) => fault("the device is gone"),
                    Ok(output) => FromExecutor::StepOutput(output),
                    Err(violation) => fault(&violation.0),
                }
            }
            Some(ToExecutor::Profile { on: true }) => {
                FromExecutor::Profiled(Profiled::Started("/traces/1.json".to_owned()))
            }
            Some(ToExecutor::Profile { on: false }) => {
                FromExecutor::Profiled(Profiled::Stopped(None))
            }
            Some(ToExecutor::Shutdown) => return,
        };
        if link.send(reply).is_err() {
            return;
        }
    }
}
