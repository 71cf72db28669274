//! Figures of a server, for Prometheus and for people.
//!
//! Writers touch atomics where something happens: a step, a token, the end of a request. Whoever reads
//! takes what lies there; nobody is asked and nobody waits, so a scrape costs a step nothing.

#![forbid(unsafe_code)]

mod block_lifetimes;
mod collectives;
mod executor_lifecycle;
mod experts;
mod exposition;
mod grammar_metrics;
mod histogram_buckets;
mod http;
mod kv_event_metrics;
pub mod kv_events;
mod log_rate_limiter;
mod metric_registrar;
mod metrics_reference;
mod process;
mod queue;
mod replicas;
mod request_times;
mod requests;
mod start_failure;
mod step_ring;
mod steps;
#[cfg(test)]
mod tests;
mod unsupported_features;

pub use block_lifetimes::BlockLifetimeMetrics;
pub use collectives::CollectiveMetrics;
pub use executor_lifecycle::ExecutorLifecycleMetrics;
pub use experts::ExpertMetrics;
pub use histogram_buckets::{CustomBuckets, CustomBucketsError};
pub use http::{HttpMetrics, OpenStream};
pub use log_rate_limiter::LogRateLimiter;
pub use metrics_reference::{page_path, reference_page};
pub use queue::QueueMetrics;
pub use request_times::RequestTimes;
pub use requests::{DeliveryRound, RequestMetrics};
pub use start_failure::StartFailure;
pub use step_ring::{STEPS_KEPT, StepRing, StepTimingRecord};
pub use steps::{StepMetrics, StepPhase};

use crate::kv_events::PublisherCounters;
use exposition::ExpositionTemplate;
use grammar::GrammarTimings;
use grammar_metrics::GrammarMetrics;
use metric_registrar::MetricRegistrar;
use process::ProcessMetrics;
use prometheus::Registry;
use replicas::ReplicaMetrics;
use scheduler::StepStats;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use unsupported_features::UnsupportedFeatureMetrics;

/// What the series of a server are called and how fine they are.
#[derive(Debug, Clone)]
pub struct MetricsConfig {
    /// Value of `model_name`: the first served name.
    pub model_name: String,
    /// Longest prompt plus output, in tokens.
    pub max_model_len: u32,
    /// Replicas that have series of their own.
    pub replicas: u16,
    /// Executors of each replica.
    pub tp_size: u16,
    /// Experts of each layer that are counted, 0 for dense layers; none where nobody counts.
    pub experts: Vec<u16>,
    /// Replicas share experts.
    pub experts_shared: bool,
    /// One series for all replicas (`--metrics-aggregate`).
    pub aggregate: bool,
    /// Series of how long KV blocks stay (`--kv-cache-metrics`).
    pub block_lifetimes: bool,
    /// Most drafts of a row.
    pub draft_tokens_max: u8,
    /// Share of drafts that a benchmark lets stand by chance; 0 = drafts are verified.
    pub synthetic_acceptance: f64,
    /// Buckets that replace the usual ones.
    pub buckets: CustomBuckets,
}

impl MetricsConfig {
    /// A server of one replica, with the usual buckets.
    pub fn new(model_name: impl Into<String>, max_model_len: u32) -> Self {
        Self {
            model_name: model_name.into(),
            max_model_len,
            replicas: 1,
            tp_size: 1,
            experts: Vec::new(),
            experts_shared: false,
            aggregate: false,
            block_lifetimes: false,
            draft_tokens_max: 0,
            synthetic_acceptance: 0.0,
            buckets: CustomBuckets::default(),
        }
    }
}

/// What `vllm:cache_config_info` says, and what token counts are made of.
#[derive(Debug, Clone, PartialEq)]
pub struct KvCacheInfo {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Blocks of one replica.
    pub blocks: u32,
    /// Type of the cached values.
    pub dtype: String,
    /// Share of the device's memory.
    pub memory_utilization: f64,
    /// Whether prefixes are shared.
    pub prefix_caching: bool,
    /// Seats of one replica.
    pub max_num_seqs: u32,
}

/// All figures of one server.
pub struct ServerMetrics {
    registry: Registry,
    /// Updating and gathering belong together: counters are brought up by differences.
    update_lock: Mutex<()>,
    exposition: Mutex<ExpositionTemplate>,
    config: MetricsConfig,
    /// Of requests.
    pub requests: RequestMetrics,
    /// Of steps.
    pub steps: StepMetrics,
    /// Of the model's experts.
    pub experts: ExpertMetrics,
    /// Of the groups of executors.
    pub collectives: CollectiveMetrics,
    /// Of the HTTP server.
    pub http: HttpMetrics,
    /// Of the executor's life.
    pub executors: ExecutorLifecycleMetrics,
    /// Of requests that wait for a seat.
    pub queue: QueueMetrics,
    /// Of constrained output; whoever compiles grammars and makes masks writes here.
    pub grammar: Arc<GrammarTimings>,
    grammar_series: GrammarMetrics,
    /// Of KV blocks that were evicted, if they are sampled.
    pub block_lifetimes: Option<BlockLifetimeMetrics>,
    /// Requests that wait outside the scheduler for their grammar.
    pub deferred: AtomicU64,
    /// Of the KV-event publishers, by replica.
    pub kv_events: Vec<Arc<PublisherCounters>>,
    kv_event_series: kv_event_metrics::KvEventMetrics,
    replicas: ReplicaMetrics,
    process: ProcessMetrics,
    unused: UnsupportedFeatureMetrics,
    kv_cache: OnceLock<KvCacheInfo>,
}

impl ServerMetrics {
    /// Every series at zero.
    ///
    /// Errors: a name or bucket list that Prometheus does not take.
    pub fn new(config: &MetricsConfig) -> Result<Arc<Self>, prometheus::Error> {
        let registry = Registry::new();
        let families = MetricRegistrar::new(&registry, config);
        let grammar = Arc::new(GrammarTimings::default());
        let metrics = Self {
            requests: RequestMetrics::new(&families)?,
            steps: StepMetrics::new(&families)?,
            experts: ExpertMetrics::new(&families, &config.experts)?,
            collectives: CollectiveMetrics::new(&families, config.experts_shared)?,
            http: HttpMetrics::new(&families)?,
            executors: ExecutorLifecycleMetrics::new(&families)?,
            queue: QueueMetrics::new(&families)?,
            grammar_series: GrammarMetrics::new(&families, &grammar)?,
            grammar,
            block_lifetimes: config
                .block_lifetimes
                .then(|| BlockLifetimeMetrics::new(&families))
                .transpose()?,
            deferred: AtomicU64::new(0),
            kv_events: (0..families.replicas()).map(|_| Arc::default()).collect(),
            kv_event_series: kv_event_metrics::KvEventMetrics::new(&families)?,
            replicas: ReplicaMetrics::new(&families, config)?,
            process: ProcessMetrics::new(&families)?,
            unused: UnsupportedFeatureMetrics::new(&families)?,
            kv_cache: OnceLock::new(),
            update_lock: Mutex::new(()),
            exposition: Mutex::default(),
            config: config.clone(),
            registry: registry.clone(),
        };
        Ok(Arc::new(metrics))
    }

    /// Tells what the cache is like. Only the first call counts.
    ///
    /// Errors: as `new`.
    pub fn set_kv_cache(&self, facts: KvCacheInfo) -> Result<(), prometheus::Error> {
        if self.kv_cache.set(facts).is_ok()
            && let Some(facts) = self.kv_cache.get()
        {
            replicas::describe_cache(&MetricRegistrar::new(&self.registry, &self.config), facts)?;
        }
        Ok(())
    }

    /// What the cache is like, once known.
    pub fn kv_cache(&self) -> Option<&KvCacheInfo> {
        self.kv_cache.get()
    }

    /// The page of this moment in Prometheus' text format 0.0.4; `stats` are those of every replica.
    ///
    /// Errors: never, as far as anybody knows: the format takes every series that was registered.
    pub fn render(&self, stats: &[StepStats]) -> Result<String, prometheus::Error> {
        let families = self.gather(stats);
        self.exposition.lock().unwrap_or_else(PoisonError::into_inner).write(&families)
    }

    fn gather(&self, stats: &[StepStats]) -> Vec<prometheus::proto::MetricFamily> {
        let _reading = self.update_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.replicas.update(stats, self.deferred.load(Ordering::Relaxed));
        self.grammar_series.update(&self.grammar);
        self.executors.update(stats);
        self.queue.update();
        self.experts.update();
        self.kv_event_series.update(&self.kv_events);
        self.process.update();
        self.unused.update();
        self.registry.gather()
    }
}
