//! `hadron serve`: serves one model. The executors are one thread of this process, or one process per rank,
//! on this node and on other nodes.
//!
//! Order of the start: the listener is opened first, so that probes can read the state of the server, and so
//! that the process ends immediately if the port is in use. Then the model files are located, the tokenizer
//! is read while the executors start, and the engine is started. If an error occurs before the server is
//! ready, the process prints the cause and ends with exit code 1.

mod serving_state;

use super::engine_start::{EngineStartInputs, EngineWithPublishers};
use super::model_files::{ModelFiles, TokenizerAndTemplate};
use super::open_server::ListeningServer;
use super::shutdown::ServerFrontend;
use super::start_policy::start_policy;
use super::{device_detection, executor_program, server_info, settings, signals, worker_node};
use crate::config::{DeviceArg, LogFormat, ProcessEnvironment, ServeArgs};
use crate::log::LogWriter;
use crate::progress::{ProgressReporter, ProgressUnit};
use anyhow::{Context, Result, anyhow};
use engine::nodes::{ClusterRequirements, NodeListener, NodeRegistry};
use engine::{
    ExecutorLaunchOptions, ExecutorLink, ExecutorManager, RemoteNodes, StartError, StartupReport,
    SupervisorEvent, SupervisorState,
};
use metrics::kv_events::{BoundPublisher, KvEventPublisher, TopicFields};
use protocol::{Epoch, StartupPhase};
use server::pooling::PoolingTask;
use server::{AppState, ServingContext, THROUGHPUT_INTERVAL, log_throughput};
use serving_state::serving_context;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tokio::runtime::{Builder, Runtime};

/// Number of threads that handle HTTP requests. The executor computes on the other cores.
const HTTP_THREADS: usize = 2;
/// Epoch of the first executors of a server. Executors that replace them after a failure have a later epoch.
const FIRST_EPOCH: Epoch = Epoch(1);

/// Serves until a shutdown signal arrives. Returns the exit code of the process.
pub fn run(args: &ServeArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .thread_name("http")
        .enable_all()
        .build()
        .context("cannot start the HTTP threads")?;
    let code = match args.nodes.cluster() {
        Some(cluster) if cluster.node > 0 => worker_node::run(args, environment, cluster, &runtime),
        _ => serve(args, environment, &runtime),
    };
    runtime.shutdown_background(); // Remaining tasks end with the process.
    code
}

fn serve(
    args: &ServeArgs,
    environment: &ProcessEnvironment,
    runtime: &Runtime,
) -> Result<ExitCode> {
    let started_at = Instant::now();
    let ListeningServer { app, connections, address, node_listener } =
        ListeningServer::open(args, environment, runtime)?;
    let files = ModelFiles::resolve(args, environment)?;
    let mut args = args.clone();
    args.engine.set_default_max_num_seqs(files.config.gated_delta.is_some());
    let publishers = bind_kv_events(&args, &files, environment)?;
    let (sender, events) = channel();
    forward_signals(&sender, runtime)?;
    let remote_nodes =
        node_listener.map(|listener| accept_nodes(listener, &args, &files)).transpose()?;
    let configuration_time = started_at.elapsed();
    let Some(started) = start(args, &files, environment, remote_nodes, &events)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let StartedModel { args, world, links, startup, text } = started;
    let args = &args;
    let parts = EngineStartInputs { args, files: &files, startup: &startup, app: &app };
    let engine = parts.start(links, publishers, sender.clone(), runtime)?;
    let EngineWithPublishers { host, metrics, publishers, limits, max_model_len } = engine;

    let logprobs_max = world.settings().max_logprobs;
    let bounds =
        settings::field_bounds(args, max_model_len, files.config.vocab as u32, logprobs_max);
    startup.phases.iter().for_each(|(name, took)| metrics.executors.startup_phase(name, *took));
    metrics.executors.started(configuration_time, started_at.elapsed());
    let mut serving =
        serving_context(args, &files, &startup, text, bounds, &host, Arc::clone(&metrics))?;
    serving.info = server_info::server_info(args, world.settings(), &serving, &startup, &limits);
    serving.kv_event_sources = publishers.iter().map(|p| Arc::clone(p.source())).collect();
    app.set_serving(serving);
    report_ready(args, &app, address, runtime);
    // An executor thread has loaded the model and is never restarted, so the files of the unpacked demo model
    // are removed now. Executor processes need them after a restart.
    let files = settings::uses_executor_processes(args).then_some(files);
    let frontend =
        ServerFrontend { app: &app, connections: &connections, runtime: runtime.handle() };
    let supervisor = SupervisorState::new(world, events, sender, metrics);
    let code = frontend.serve(host, supervisor, args.http.shutdown_timeout.0);
    publishers.into_iter().for_each(KvEventPublisher::finish);
    drop(files);
    Ok(code)
}

/// Forwards shutdown signals to the supervisor.
fn forward_signals(sender: &Sender<SupervisorEvent>, runtime: &Runtime) -> Result<()> {
    let _runtime_guard = runtime.enter();
    let sender = sender.clone();
    signals::forward(move |number| sender.send(SupervisorEvent::Signal(number)).is_ok())
        .context("cannot install signal handlers")
}

/// Reports that the server is ready, and starts the log of its throughput.
fn report_ready(args: &ServeArgs, app: &Arc<AppState>, address: SocketAddr, runtime: &Runtime) {
    if !args.log.disable_log_stats {
        runtime.spawn(log_throughput(Arc::clone(app), THROUGHPUT_INTERVAL));
    }
    if let Ok(serving) = app.serving() {
        log_ready(args.log.log_format, serving, address);
    }
}

/// Starts the thread that accepts the other nodes of the cluster. A node is rejected if it differs from this
/// server in a `ClusterRequirements` value, such as the digest of the model files.
fn accept_nodes(
    listener: NodeListener,
    args: &ServeArgs,
    files: &ModelFiles,
) -> Result<RemoteNodes> {
    let cluster = args.nodes.cluster().context("the server has a single node")?.clone();
    let (parallel, manifest) = (settings::parallel(args), files.manifest);
    let expected = ClusterRequirements { nodes: cluster.nodes, parallel, manifest };
    let registry = Arc::new(NodeRegistry::new(expected));
    listener.start(&registry).context("cannot start the node listener thread")?;
    Ok(RemoteNodes { cluster, registry })
}

/// Opens the sockets of the KV-event publishers, one per replica; returns none if KV events are disabled.
fn bind_kv_events(
    args: &ServeArgs,
    files: &ModelFiles,
    environment: &ProcessEnvironment,
) -> Result<Vec<BoundPublisher>> {
    let Some(config) = args.kv_events.enabled() else { return Ok(Vec::new()) };
    if !args.engine.enable_prefix_caching {
        tracing::warn!("KV events are enabled, but without prefix caching there are none");
    }
    let topic_fields = |rank| TopicFields {
        pod: environment.pod_name.clone().unwrap_or_default(),
        model: files.served_names(args).first().to_owned(),
        rank,
        epoch: 0, // Set when the socket is opened.
    };
    (0..args.parallel.data_parallel_size)
        .map(|rank| BoundPublisher::open(&config, topic_fields(rank)).context("--kv-events-config"))
        .collect()
}

/// A model whose executors have started.
struct StartedModel {
    /// Command-line arguments, with the device that `--device auto` selected.
    args: ServeArgs,
    world: ExecutorManager,
    links: Vec<ExecutorLink>,
    startup: StartupReport,
    text: TokenizerAndTemplate,
}

/// Starts the executors and reads the tokenizer files at the same time. With `--device auto` and one
/// executor, falls back to the CPU if the detected GPU is unusable. Returns `None` if a shutdown signal
/// arrived.
fn start(
    mut args: ServeArgs,
    files: &ModelFiles,
    environment: &ProcessEnvironment,
    remote_nodes: Option<RemoteNodes>,
    events: &Receiver<SupervisorEvent>,
) -> Result<Option<StartedModel>> {
    let auto = args.engine.device == DeviceArg::Auto;
    if auto {
        args.engine.device = device_detection::detect();
    }
    settings::check_world(&args, files)?;
    let mut world = start_executors(&args, files, environment, remote_nodes)?;
    let mut links = Vec::new();
    let text = files.load_text(&args)?;
    let mut startup = wait_until_ready(&mut world, &mut links, events);
    if let Err(error) = &startup
        && auto
        && can_fall_back_to_cpu(&args, error)
    {
        tracing::warn!(%error, "the GPU is not usable; falling back to the CPU");
        args.engine.device = DeviceArg::Cpu;
        world = start_executors(&args, files, environment, None)?;
        links.clear();
        startup = wait_until_ready(&mut world, &mut links, events);
    }
    match startup {
        Ok(startup) => Ok(Some(StartedModel { args, world, links, startup, text })),
        Err(StartError::Interrupted(_)) => Ok(None),
        Err(error) => Err(anyhow!(error).context(files.name.clone())),
    }
}

/// Whether the CPU can replace the detected device after the start failed with `error`: there is one
/// executor, it uses a GPU, and it failed to open the GPU.
fn can_fall_back_to_cpu(args: &ServeArgs, error: &StartError) -> bool {
    settings::parallel(args).world_size() == 1
        && args.engine.device != DeviceArg::Cpu
        && error.is_device_error()
}

/// Starts the executors that the arguments configure.
fn start_executors(
    args: &ServeArgs,
    files: &ModelFiles,
    environment: &ProcessEnvironment,
    remote_nodes: Option<RemoteNodes>,
) -> Result<ExecutorManager> {
    let config = settings::executor(args, files, environment)?;
    let lifetime = ExecutorLaunchOptions {
        as_processes: settings::uses_executor_processes(args),
        program: executor_program::program(args.log.log_format),
    };
    let jitter_seed = RandomState::new().hash_one(0);
    let mut world =
        ExecutorManager::new(&config, lifetime, start_policy(args, jitter_seed), remote_nodes);
    world.start(FIRST_EPOCH)?;
    Ok(world)
}

/// Waits until the executors are ready, and shows their progress.
fn wait_until_ready(
    world: &mut ExecutorManager,
    links: &mut Vec<ExecutorLink>,
    events: &Receiver<SupervisorEvent>,
) -> Result<StartupReport, StartError> {
    let mut shown: Option<(StartupPhase, ProgressReporter)> = None;
    // Before the engine runs, signals are the only source of supervisor events.
    let stop = || match events.try_recv() {
        Ok(SupervisorEvent::Signal(number)) => Some(number),
        _ => None,
    };
    let startup = world.bring_up(links, stop, |phase, done, total| {
        if shown.as_ref().is_none_or(|(shown_phase, _)| *shown_phase != phase)
            && let Some((_, previous)) = shown.replace((phase, new_progress(phase, total)))
        {
            previous.finish();
        }
        if let Some((_, progress)) = &shown {
            progress.set(done, total);
        }
    });
    if let Some((_, progress)) = shown.filter(|_| startup.is_ok()) {
        progress.finish();
    }
    startup
}

fn new_progress(phase: StartupPhase, total: u64) -> ProgressReporter {
    match phase {
        StartupPhase::Load => ProgressReporter::new(phase.name(), total, ProgressUnit::Bytes),
        StartupPhase::Device
        | StartupPhase::Join
        | StartupPhase::Compile
        | StartupPhase::WarmUp
        | StartupPhase::Capture => ProgressReporter::new(phase.name(), total, ProgressUnit::Items),
    }
}

/// Reports that the server is ready: as text with an example request, or as a log event in JSON.
fn log_ready(format: LogFormat, serving: &ServingContext, address: SocketAddr) {
    match format {
        LogFormat::Human => LogWriter::default().write_plain_line(&ready_message(serving, address)),
        LogFormat::Json => {
            let model = serving.card.names.first();
            let (max_model_len, kv_cache_tokens) =
                (serving.field_bounds.max_model_len, serving.pool_tokens);
            tracing::info!(%address, model, max_model_len, kv_cache_tokens, "ready");
        }
    }
}

fn ready_message(serving: &ServingContext, address: SocketAddr) -> String {
    let task = serving.pooler.as_ref().map(|pooler| pooler.task);
    let (path, body) = if task == Some(PoolingTask::Embed) {
        ("/v1/embeddings", r#"{"input":"Once upon a time"}"#.to_owned())
    } else if task == Some(PoolingTask::Score) {
        ("/v1/rerank", r#"{"query":"a tale","documents":["Once upon a time","1 + 1"]}"#.to_owned())
    } else if serving.template.is_some() {
        let content = "What is 12 plus 30?";
        let body = format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}]}}"#);
        ("/v1/chat/completions", body)
    } else {
        ("/v1/completions", r#"{"prompt":"Once upon a time"}"#.to_owned())
    };
    let name = serving.card.names.first();
    let (max_model_len, pool_tokens) = (serving.field_bounds.max_model_len, serving.pool_tokens);
    format!(
        "hadron {} serves {name} on http://{address} (up to {max_model_len} tokens per request, \
         {pool_tokens} tokens in the KV cache)\ntry:\n  curl http://{address}{path} \
         -H 'Content-Type: application/json' -d '{body}'",
        env!("CARGO_PKG_VERSION"),
    )
}
