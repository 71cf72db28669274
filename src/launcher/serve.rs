//! `hadron serve`: one model. Its executors are one thread of this process, or a process each, here and on other nodes.
//!
//! Order: the socket opens first (probes tell the truth from then on, a port in use ends it at
//! once), then the model's files, then text and executors, then the engine. Whatever fails before
//! ready ends the process with exit code 1 and its cause.

use super::engine_thread::Notice;
use super::executor::{ExecutorLink, Lifetime, Others, World};
use super::host::{Deciding, Host, Observers};
use super::model_files::{ModelFiles, Text};
use super::nodes::{self, Door, Registry};
use super::shutdown::Front;
use super::start_rules::start_rules;
use super::start_up::{StartError, Up};
use super::supervisor::{self, Supervised};
use super::{device, grammar_worker, info, listen, parsers, settings, signals, template_worker};
use crate::config::{DeviceKind, Environment, Length, LogFormat, ServeArgs};
use crate::grammar::Grammars;
use crate::kv_events::{Bound, Feed, Publisher, TopicWords};
use crate::log::LogWriter;
use crate::metrics::{CacheFacts, Metrics, MetricsConfig};
use crate::progress::{Progress, Unit};
use crate::server::app::{App, ModelCard, Serving};
use crate::server::health::Health;
use crate::server::listen::Connections;
use crate::server::openai::exchange::unix_time;
use crate::server::openai::params::Bounds;
use crate::server::trace::Tracer;
use crate::text::RequestTemplates;
use anyhow::{Context, Result, anyhow, bail};
use protocol::{Epoch, Phase};
use scheduler::{Engine, EngineConfig, EngineError, KvConfig, StepDeadline};
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;
use tokio::runtime::{Builder, Runtime};

/// Threads that serve sockets; the executor computes on the rest.
const HTTP_THREADS: usize = 2;
/// The engine counts its executors' generations from here.
const FIRST_EPOCH: Epoch = Epoch(1);

/// Serves until told to stop. Returns the process's exit code.
pub fn run(args: &ServeArgs, environment: &Environment) -> Result<ExitCode> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .thread_name("http")
        .enable_all()
        .build()
        .context("cannot start the HTTP threads")?;
    let code = match args.nodes.cluster() {
        Some(cluster) if cluster.node > 0 => {
            nodes::member::run(args, environment, cluster, &runtime)
        }
        _ => serve(args, environment, &runtime),
    };
    runtime.shutdown_background(); // Whatever still runs there ends with the process.
    code
}

fn serve(args: &ServeArgs, environment: &Environment, runtime: &Runtime) -> Result<ExitCode> {
    let began = Instant::now();
    let health = Arc::new(Health::default());
    let app = Arc::new(App::new(settings::options(args)?, Arc::clone(&health)));
    {
        let _inside = runtime.enter();
        let tracer = app.options.tracer.clone();
        signals::survive(move || tracer.iter().for_each(Tracer::reopen))
            .context("cannot watch for signals")?;
    }
    let connections = Connections::new(settings::connections_max());
    let address = listen::public(args, runtime, &app, &connections)?;
    listen::admin(args, runtime, &app, &connections)?;
    let open = |cluster| Door::open(cluster, args.nodes.secret(environment)?);
    let door = args.nodes.cluster().map(open).transpose()?;

    let files = ModelFiles::resolve(args, environment)?;
    let bound = bind_kv_events(args, &files, environment)?;
    let (sender, notices) = channel();
    {
        let _inside = runtime.enter();
        let sender = sender.clone();
        signals::forward(move |number| sender.send(Notice::Signal(number)).is_ok())
            .context("cannot watch for signals")?;
    }
    let others = door.map(|door| let_in(door, args, &files)).transpose()?;
    let configured = began.elapsed();
    let Some(started) = start(args.clone(), &files, environment, others, &notices)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let Started { args, world, links, up, text } = started;
    let args = &args;
    let (engine, max_model_len) = engine(args, &files, &up)?;
    let limits = engine.limits().clone();
    let fixed = args.engine.step_deadline.map(|seconds| seconds.0);
    let deadline = StepDeadline::new(fixed, up.memory.pace);
    let admission = settings::admission(&args.engine, args.parallel.data_parallel_size);
    let metrics = metrics(args, &files, &up, &engine, max_model_len)?;
    let observers = Observers { health, metrics: Arc::clone(&metrics) };
    let (kv_events, publishers) = start_kv_events(bound, &up, &metrics)?;
    let deciding = Deciding { engine, kv_events };
    let host = Host::start(
        deciding,
        links,
        admission,
        deadline,
        observers,
        sender.clone(),
        runtime.handle(),
    )
    .context("cannot start the scheduler's thread")?;

    let logprobs_max = world.settings().logprobs_max;
    let bounds = settings::bounds(args, max_model_len, files.config.vocab as u32, logprobs_max);
    metrics.life.started(&up.phases, configured, began.elapsed());
    let of_serving = (&host, Arc::clone(&metrics));
    let mut serving = serving(args, &files, &up, text, bounds, of_serving)?;
    serving.info = info::of(args, world.settings(), &serving, &up, &limits);
    serving.kv_event_sources = publishers.iter().map(|p| Arc::clone(p.source())).collect();
    app.set_serving(serving);
    if let Ok(serving) = app.serving() {
        greet(args.log.log_format, serving, address);
    }
    // An executor in a thread has no second start, and needs no unpacked demo any more.
    let files = settings::apart(args).then_some(files);
    let front = Front { app: &app, connections: &connections, runtime: runtime.handle() };
    let supervised = Supervised::new(world, notices, sender, metrics);
    let code = supervisor::run(&front, host, supervised, args.http.shutdown_timeout.0);
    publishers.into_iter().for_each(Publisher::finish);
    drop(files);
    Ok(code)
}

/// Lets the other nodes in, as far as they belong here.
fn let_in(door: Door, args: &ServeArgs, files: &ModelFiles) -> Result<Others> {
    let cluster = args.nodes.cluster().context("a node that serves alone")?.clone();
    let (parallel, manifest) = (settings::parallel(args), files.manifest);
    let expected = nodes::Expected { nodes: cluster.nodes, parallel, manifest };
    let registry = Arc::new(Registry::new(expected));
    door.receive(&registry).context("cannot start a thread for other nodes")?;
    Ok(Others { cluster, registry })
}

/// Starts the publishers of KV events.
fn start_kv_events(
    bound: Vec<Bound>,
    up: &Up,
    metrics: &Metrics,
) -> Result<(Vec<Feed>, Vec<Publisher>)> {
    let (spec, blocks) = (&up.memory.spec, up.ready.blocks);
    let start = |(bound, figures): (Bound, _)| bound.start(spec, blocks, Arc::clone(figures));
    let started: std::io::Result<Vec<_>> =
        bound.into_iter().zip(&metrics.kv_events).map(start).collect();
    Ok(started.context("cannot start a thread for KV events")?.into_iter().unzip())
}

/// Opens the sockets of the publishers of KV events, one per replica, if there shall be any.
fn bind_kv_events(
    args: &ServeArgs,
    files: &ModelFiles,
    environment: &Environment,
) -> Result<Vec<Bound>> {
    let Some(config) = args.kv_events.enabled() else { return Ok(Vec::new()) };
    if !args.engine.enable_prefix_caching {
        tracing::warn!("KV events are on, but without prefix caching there is nothing to announce");
    }
    let words = |rank| TopicWords {
        pod: environment.pod.clone().unwrap_or_default(),
        model: files.served_names(args).into_iter().next().unwrap_or_default(),
        rank,
        epoch: 0, // Chosen with the socket.
    };
    (0..args.parallel.data_parallel_size)
        .map(|rank| Bound::open(&config, words(rank)).context("--kv-events-config"))
        .collect()
}

/// A model that is up.
struct Started {
    /// As given, with `--device auto` resolved.
    args: ServeArgs,
    world: World,
    links: Vec<ExecutorLink>,
    up: Up,
    text: Text,
}

/// Starts the executors and reads the model's text files meanwhile. A GPU that was merely found, and cannot
/// be used, gives way to the CPU, unless there should be several. `None` = told to stop.
fn start(
    mut args: ServeArgs,
    files: &ModelFiles,
    environment: &Environment,
    others: Option<Others>,
    notices: &Receiver<Notice>,
) -> Result<Option<Started>> {
    let auto = args.engine.device == DeviceKind::Auto;
    if auto {
        args.engine.device = device::found();
    }
    settings::check_world(&args, files)?;
    let (mut world, mut links) = start_executors(&args, files, environment, others)?;
    let text = files.load_text(&args)?;
    let mut up = wait_for(&mut world, &mut links, notices);
    if let Err(error) = &up
        && auto
        && settings::parallel(&args).world_size() == 1
        && args.engine.device != DeviceKind::Cpu
        && error.is_of_the_device()
    {
        tracing::warn!(%error, "the GPU cannot be used: computing on the CPU");
        args.engine.device = DeviceKind::Cpu;
        (world, links) = start_executors(&args, files, environment, None)?;
        up = wait_for(&mut world, &mut links, notices);
    }
    match up {
        Ok(up) => Ok(Some(Started { args, world, links, up, text })),
        Err(StartError::Signal(_)) => Ok(None),
        Err(error) => Err(anyhow!(error).context(files.name.clone())),
    }
}

/// What handlers need to serve the model.
fn serving(
    args: &ServeArgs,
    files: &ModelFiles,
    up: &Up,
    text: Text,
    bounds: Bounds,
    (host, metrics): (&Host, Arc<Metrics>),
) -> Result<Serving> {
    let block_tokens = up.memory.spec.block_tokens;
    let architecture = files.config.architecture;
    let parsers = parsers::of(&args.reply, architecture, text.template.as_ref(), &text.tokenizer);
    let tokenizer = Arc::new(text.tokenizer);
    let tokens = Arc::clone(&tokenizer);
    let timings = Arc::clone(&host.grammar_timings);
    let trials = grammar_worker::program(args.log.log_format);
    let grammars = Grammars::start(move || tokens.grammar_vocabulary(), &trials, timings)
        .context("cannot start the threads that compile grammars")?;
    let prompt_bytes_max = settings::prompt_bytes_max(bounds.max_model_len);
    let trusted = args.reply.trust_request_chat_template;
    let program = trusted.then(template_worker::program);
    let request_templates = program
        .map(|program| RequestTemplates::new(program, &tokenizer, prompt_bytes_max))
        .transpose()?;
    Ok(Serving {
        client: host.client.clone(),
        grammars,
        parsers,
        tokenizer,
        template: text.template,
        card: ModelCard {
            names: files.served_names(args),
            root: files.name.clone(),
            created: unix_time(),
            fingerprint: files.fingerprint(&args.model, &up.weights)?,
        },
        defaults: settings::defaults(&args.reply, &files.config.generation),
        template_defaults: args.reply.default_chat_template_kwargs.clone().unwrap_or_default(),
        request_templates,
        body_bytes_max: settings::body_bytes_max(bounds.max_model_len),
        bounds,
        block_tokens: if args.engine.enable_prefix_caching { block_tokens } else { 0 },
        pool_tokens: u64::from(up.ready.blocks) * u64::from(block_tokens),
        metrics,
        kv_event_sources: Vec::new(),
        info: serde_json::Value::Null,
    })
}

/// The figures of this server.
fn metrics(
    args: &ServeArgs,
    files: &ModelFiles,
    up: &Up,
    engine: &Engine,
    max_model_len: u32,
) -> Result<Arc<Metrics>> {
    let name = files.served_names(args).into_iter().next().unwrap_or_default();
    let experts = settings::experts_counted(&files.config);
    let config = MetricsConfig { experts, ..settings::metrics(args, name, max_model_len) };
    let metrics = Metrics::new(&config)?;
    metrics.set_cache(CacheFacts {
        block_tokens: up.memory.spec.block_tokens,
        blocks: up.ready.blocks,
        dtype: args.engine.kv_cache_dtype.name().to_owned(),
        memory_utilization: args.engine.gpu_memory_utilization,
        prefix_caching: args.engine.enable_prefix_caching,
        seats: engine.limits().requests_running,
    })?;
    Ok(metrics)
}

/// Starts the executors that the arguments ask for.
fn start_executors(
    args: &ServeArgs,
    files: &ModelFiles,
    environment: &Environment,
    others: Option<Others>,
) -> Result<(World, Vec<ExecutorLink>)> {
    let config = settings::executor(args, files, environment)?;
    let lifetime = Lifetime { apart: settings::apart(args), log: args.log.log_format };
    let jitter_seed = RandomState::new().hash_one(0);
    let mut world = World::new(&config, lifetime, start_rules(args, jitter_seed), others);
    let links = world.start(FIRST_EPOCH)?;
    Ok((world, links))
}

/// Waits until the executors are ready and shows how far they are.
fn wait_for(
    world: &mut World,
    links: &mut Vec<ExecutorLink>,
    notices: &Receiver<Notice>,
) -> Result<Up, StartError> {
    let mut shown: Option<(Phase, Progress)> = None;
    // Nothing else can be noticed before there is an engine.
    let stop = || match notices.try_recv() {
        Ok(Notice::Signal(number)) => Some(number),
        _ => None,
    };
    let up = world.bring_up(links, stop, |phase, done, total| {
        if shown.as_ref().is_none_or(|(of, _)| *of != phase)
            && let Some((_, over)) = shown.replace((phase, new_progress(phase, total)))
        {
            over.finish();
        }
        if let Some((_, progress)) = &shown {
            progress.set(done, total);
        }
    });
    if let Some((_, progress)) = shown.filter(|_| up.is_ok()) {
        progress.finish();
    }
    up
}

fn new_progress(phase: Phase, total: u64) -> Progress {
    match phase {
        Phase::Load => Progress::new(phase.name(), total, Unit::Bytes),
        Phase::Device | Phase::Join | Phase::Compile | Phase::WarmUp | Phase::Capture => {
            Progress::new(phase.name(), total, Unit::Items)
        }
    }
}

/// The scheduler, and the longest request it takes: what was asked for, or what the cache holds.
fn engine(args: &ServeArgs, files: &ModelFiles, up: &Up) -> Result<(Engine, u32)> {
    if let Some(rate) = settings::synthetic_acceptance(args) {
        tracing::warn!(
            rate,
            "benchmark mode: chance decides which drafts stand, and answers mean nothing"
        );
    }
    let random = RandomState::new();
    let keys = [random.hash_one(0), random.hash_one(1)];
    let mut kv = KvConfig::new(up.memory.spec.clone(), up.ready.blocks, keys);
    kv.caching = args.engine.enable_prefix_caching;
    kv.events = args.kv_events.enabled().is_some();
    kv.residency = args.metrics.residency();
    let build = |max_model_len: u32| {
        let replicas = args.parallel.data_parallel_size;
        let limits =
            settings::limits(&args.engine, replicas, max_model_len, files.config.vocab as u32);
        let limits = settings::with_drafts(limits, args.speculation.speculation());
        let mut config = EngineConfig::new(limits, kv.clone());
        config.replicas = replicas;
        config.lockstep = settings::parallel(args).lockstep();
        // Where no step is recorded a chunk makes nobody else's slower.
        config.prefill_gate = !up.ready.graph_rows.is_empty();
        config.graph_rows.clone_from(&up.ready.graph_rows);
        config.routing = settings::routing(args.parallel.dp_load_balance);
        Engine::new(config)
    };
    let asked = files.max_model_len;
    match build(asked) {
        Ok(engine) => Ok((engine, asked)),
        Err(EngineError::PoolTooSmall { fits, .. }) if args.model.max_model_len == Length::Auto => {
            let fits = u32::try_from(fits).unwrap_or(u32::MAX).min(asked);
            tracing::warn!(
                max_model_len = fits,
                of_model = asked,
                "the KV cache holds less than the model's longest request; \
                 --kv-cache-memory-bytes makes it larger"
            );
            Ok((build(fits)?, fits))
        }
        Err(error) => bail!(error),
    }
}

/// Says that all is well: to people with what to type next, to collectors of logs as an event.
fn greet(format: LogFormat, serving: &Serving, address: SocketAddr) {
    match format {
        LogFormat::Human => LogWriter::default().say(&greeting(serving, address)),
        LogFormat::Json => {
            let model = serving.card.names.first().map_or("", String::as_str);
            let (max_model_len, kv_cache_tokens) =
                (serving.bounds.max_model_len, serving.pool_tokens);
            tracing::info!(%address, model, max_model_len, kv_cache_tokens, "ready");
        }
    }
}

fn greeting(serving: &Serving, address: SocketAddr) -> String {
    let (path, body) = if serving.template.is_some() {
        let content = "What is 12 plus 30?";
        let body = format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}]}}"#);
        ("/v1/chat/completions", body)
    } else {
        ("/v1/completions", r#"{"prompt":"Once upon a time"}"#.to_owned())
    };
    let name = serving.card.names.first().map_or("", String::as_str);
    let (most, pool) = (serving.bounds.max_model_len, serving.pool_tokens);
    format!(
        "hadron {} serves {name} on http://{address} (up to {most} tokens a request, \
         {pool} in the KV cache)\ntry:\n  curl http://{address}{path} \
         -H 'Content-Type: application/json' -d '{body}'",
        env!("CARGO_PKG_VERSION"),
    )
}
