//! Starts the engine of a loaded model: scheduler, metrics and KV-event publishers.

use super::model_files::ModelFiles;
use super::settings;
use crate::config::{MaxModelLenArg, ServeArgs};
use anyhow::{Context, Result, bail};
use engine::{
    EngineTelemetry, ExecutorLink, RunningEngine, SchedulerWithKvEvents, StartupReport,
    SupervisorEvent,
};
use metrics::kv_events::{BoundPublisher, KvEventFeed, KvEventPublisher};
use metrics::{KvCacheInfo, MetricsConfig, ServerMetrics};
use scheduler::{
    KvConfig, Scheduler, SchedulerConfig, SchedulerConfigError, SchedulerLimits,
    StepDeadlineEstimator,
};
use server::AppState;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use tokio::runtime::Runtime;

/// Inputs for starting the engine: command-line arguments, model files, startup report and server state.
pub(super) struct EngineStartInputs<'a> {
    pub(super) args: &'a ServeArgs,
    pub(super) files: &'a ModelFiles,
    pub(super) startup: &'a StartupReport,
    pub(super) app: &'a AppState,
}

/// Running engine, with its metrics, KV-event publishers and limits.
pub(super) struct EngineWithPublishers {
    pub(super) host: RunningEngine,
    pub(super) metrics: Arc<ServerMetrics>,
    pub(super) publishers: Vec<KvEventPublisher>,
    pub(super) limits: SchedulerLimits,
    /// Maximum number of tokens of a request.
    pub(super) max_model_len: u32,
}

impl EngineStartInputs<'_> {
    /// Starts the engine. `links`: one link to the executors per replica. The engine sends its events to
    /// `sender`.
    ///
    /// Errors: a setting is invalid, or a thread cannot be started.
    pub(super) fn start(
        &self,
        links: Vec<ExecutorLink>,
        publishers: Vec<BoundPublisher>,
        sender: Sender<SupervisorEvent>,
        runtime: &Runtime,
    ) -> Result<EngineWithPublishers> {
        let Self { args, files, startup, app } = *self;
        let (scheduler, max_model_len) = scheduler(args, files, startup)?;
        let limits = scheduler.limits().clone();
        let fixed_deadline = args.engine.step_deadline.map(|seconds| seconds.0);
        let deadline = StepDeadlineEstimator::new(fixed_deadline, startup.memory.step_cost);
        let admission = settings::admission(&args.engine, &limits);
        let metrics = metrics(args, files, startup, &scheduler, max_model_len)?;
        let health = Arc::clone(&app.health);
        let observers = EngineTelemetry { health, metrics: Arc::clone(&metrics) };
        let (kv_events, publishers) = start_kv_events(publishers, startup, &metrics)?;
        let parts = SchedulerWithKvEvents { engine: scheduler, kv_events };
        let runtime = runtime.handle();
        let host =
            RunningEngine::start(parts, links, admission, deadline, observers, sender, runtime)
                .context("cannot start the scheduler thread")?;
        Ok(EngineWithPublishers { host, metrics, publishers, limits, max_model_len })
    }
}

/// Starts the KV-event publishers. Returns the feed of each replica's events, and the publishers.
fn start_kv_events(
    publishers: Vec<BoundPublisher>,
    startup: &StartupReport,
    metrics: &ServerMetrics,
) -> Result<(Vec<KvEventFeed>, Vec<KvEventPublisher>)> {
    let (spec, blocks) = (&startup.memory.kv_spec, startup.ready.kv_blocks);
    let start = |(publisher, counters): (BoundPublisher, _)| {
        publisher.start(spec, blocks, Arc::clone(counters))
    };
    let started: std::io::Result<Vec<_>> =
        publishers.into_iter().zip(&metrics.kv_events).map(start).collect();
    Ok(started.context("cannot start a KV-event publisher thread")?.into_iter().unzip())
}

/// Creates the metrics of this server.
fn metrics(
    args: &ServeArgs,
    files: &ModelFiles,
    startup: &StartupReport,
    scheduler: &Scheduler,
    max_model_len: u32,
) -> Result<Arc<ServerMetrics>> {
    let name = files.served_names(args).first().to_owned();
    let experts = settings::expert_counts_by_layer(&files.config);
    let spec = &startup.memory.kv_spec;
    let kv_kinds = spec.groups.iter().map(|group| group.kind).collect();
    let config = settings::metrics(args, name, max_model_len);
    let config = MetricsConfig { experts, kv_kinds, ..config };
    let metrics = ServerMetrics::new(&config)?;
    metrics.set_kv_cache(KvCacheInfo {
        block_tokens: startup.memory.kv_spec.block_tokens,
        blocks: startup.ready.kv_blocks,
        pool_tokens: pool_tokens(startup, max_model_len),
        dtype: args.engine.kv_cache_dtype.name().to_owned(),
        memory_utilization: args.engine.gpu_memory_utilization,
        prefix_caching: args.engine.enable_prefix_caching,
        max_num_seqs: scheduler.limits().max_num_seqs,
    })?;
    Ok(metrics)
}

/// Returns the capacity of the KV pool of a replica in tokens, for requests of `max_model_len` tokens. Such a
/// request holds a block of each group that keeps all positions for every `block_tokens` tokens, but only the
/// blocks of the newest tokens of a group with a window.
pub(super) fn pool_tokens(startup: &StartupReport, max_model_len: u32) -> u64 {
    let (spec, blocks) = (&startup.memory.kv_spec, u64::from(startup.ready.kv_blocks));
    let blocks_of_request = spec.blocks_of_request(max_model_len, 1);
    let whole_blocks = u64::from(max_model_len.div_ceil(spec.block_tokens));
    blocks * whole_blocks * u64::from(spec.block_tokens) / u64::from(blocks_of_request.max(1))
}

/// Creates the scheduler. Also returns the maximum number of tokens of a request: the value of
/// `--max-model-len` or, without the flag, the number that fits in the KV cache.
fn scheduler(
    args: &ServeArgs,
    files: &ModelFiles,
    startup: &StartupReport,
) -> Result<(Scheduler, u32)> {
    if let Some(rate) = settings::synthetic_acceptance(args) {
        tracing::warn!(
            rate,
            "benchmark mode: draft tokens are accepted at random, and outputs are meaningless"
        );
    }
    let random = RandomState::new();
    let keys = [random.hash_one(0), random.hash_one(1)];
    let mut kv = KvConfig::new(startup.memory.kv_spec.clone(), startup.ready.kv_blocks, keys);
    kv.caching = args.engine.enable_prefix_caching;
    kv.events = args.kv_events.enabled().is_some();
    kv.lifetime_sample = args.metrics.block_lifetime_sample_rate();
    // Executors allocate the same number.
    kv.state_slots = startup.memory.kv_spec.state_slots(args.engine.max_num_seqs());
    let build = |max_model_len: u32| {
        let replicas = args.parallel.data_parallel_size;
        let waiting = settings::waiting_requests_default(files);
        let vocab_size = files.config.vocab as u32;
        let limits = settings::limits(&args.engine, replicas, waiting, max_model_len, vocab_size);
        let limits = settings::limits_with_draft_tokens(limits, args.speculation.speculation());
        let mut config = SchedulerConfig::new(limits, kv.clone());
        config.replicas = replicas;
        config.lockstep = settings::parallel(args).lockstep();
        // The prefill gate delays prefill so that replicas that run their steps in lockstep can replay
        // captured graphs in decode steps. Without captured graphs, all steps are eager, and the gate has no
        // benefit.
        config.prefill_gate = !startup.ready.capture_sizes.is_empty();
        config.capture_sizes.clone_from(&startup.ready.capture_sizes);
        config.routing = settings::routing(args.parallel.dp_load_balance);
        Scheduler::new(config)
    };
    let requested = files.max_model_len;
    match build(requested) {
        Ok(scheduler) => Ok((scheduler, requested)),
        Err(SchedulerConfigError::PoolTooSmall { longest_request, .. })
            if args.model.max_model_len == MaxModelLenArg::Auto =>
        {
            let max_model_len = longest_request.min(requested);
            tracing::warn!(
                max_model_len,
                of_model = requested,
                "the KV cache is smaller than the model's maximum request length; \
                 increase --kv-cache-memory-bytes"
            );
            Ok((build(max_model_len)?, max_model_len))
        }
        Err(error) => bail!(error),
    }
}
