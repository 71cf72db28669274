//! Metrics of a server, for Prometheus and for diagnostics.
//!
//! Writers update atomics where an event occurs: a step, a token, the end of a request. Readers load these
//! atomics without synchronising with the writers, so a scrape does not delay a step.

#![forbid(unsafe_code)]

mod block_lifetimes;
mod collectives;
#[cfg(test)]
#[path = "../../tests/support/deadlines.rs"]
mod deadlines;
mod executor_lifecycle;
mod experts;
mod exposition;
mod grammar_metrics;
mod histogram_buckets;
mod http;
mod kv_event_metrics;
pub mod kv_events;
mod kv_group_metrics;
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
pub use http::{HttpMetrics, OpenStreamGuard};
pub use log_rate_limiter::LogRateLimiter;
pub use metrics_reference::{page_path, reference_page};
pub use queue::QueueMetrics;
pub use request_times::RequestTimes;
pub use requests::{RequestMetrics, TokenEventRecorder};
pub use start_failure::RestartFailureKind;
pub use step_ring::{STEP_RING_CAPACITY, StepTimingRecord, StepTimingRing};
pub use steps::{StepMetrics, StepPhase};

use crate::kv_events::PublisherCounters;
use exposition::ExpositionTemplate;
use grammar::GrammarTimings;
use grammar_metrics::GrammarMetrics;
use metric_registrar::MetricRegistrar;
use process::ProcessMetrics;
use prometheus::Registry;
use protocol::KvKind;
use replicas::ReplicaMetrics;
use scheduler::SchedulerStats;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use unsupported_features::UnsupportedFeatureMetrics;

/// Configuration of a server's metrics: label values, and which series exist.
#[derive(Debug, Clone)]
pub struct MetricsConfig {
    /// Value of the label `model_name`: the first served model name.
    pub model_name: String,
    /// Maximum length of prompt plus output, in tokens.
    pub max_model_len: u32,
    /// Number of replicas (data parallel size).
    pub replicas: u16,
    /// Number of executors per replica (tensor parallel size).
    pub tp_size: u16,
    /// Number of experts in each layer, 0 for dense layers; empty if the tokens per expert are not counted.
    pub experts: Vec<u16>,
    /// Whether replicas share experts (expert parallelism across DP).
    pub experts_shared: bool,
    /// Whether all replicas share one series (`--metrics-aggregate`).
    pub aggregate: bool,
    /// Whether lifetimes of KV blocks are observed (`--kv-cache-metrics`).
    pub block_lifetimes: bool,
    /// Kinds of the KV groups, in order of the groups.
    pub kv_kinds: Vec<KvKind>,
    /// Maximum number of draft tokens per row.
    pub draft_tokens_max: u8,
    /// Fraction of draft tokens that are accepted at random for a benchmark; 0 = draft tokens are verified.
    pub synthetic_acceptance: f64,
    /// Histogram bucket bounds that replace the default bounds.
    pub buckets: CustomBuckets,
}

impl MetricsConfig {
    /// Returns the configuration of a server with one replica and default buckets.
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
            kv_kinds: Vec::new(),
            draft_tokens_max: 0,
            synthetic_acceptance: 0.0,
            buckets: CustomBuckets::default(),
        }
    }
}

/// KV cache properties, shown by `vllm:cache_config_info` and used to convert block counts to token counts.
#[derive(Debug, Clone, PartialEq)]
pub struct KvCacheInfo {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Number of KV blocks per replica.
    pub blocks: u32,
    /// Capacity of the KV pool of a replica, in tokens.
    pub pool_tokens: u64,
    /// Data type of the KV cache.
    pub dtype: String,
    /// Fraction of the device memory that the server may use (`gpu_memory_utilization`).
    pub memory_utilization: f64,
    /// Whether prefix caching is enabled.
    pub prefix_caching: bool,
    /// Maximum number of running requests (sequence slots) per replica.
    pub max_num_seqs: u32,
}

/// All metrics of one server.
pub struct ServerMetrics {
    registry: Registry,
    /// Serialises scrapes, because a scrape increases each counter by the difference between the current
    /// total and the counter's value.
    update_lock: Mutex<()>,
    exposition: Mutex<ExpositionTemplate>,
    config: MetricsConfig,
    /// Metrics of requests: latencies, token counts, finish reasons.
    pub requests: RequestMetrics,
    /// Metrics of steps: durations of the phases of a step, numbers of rows and tokens, throughput.
    pub steps: StepMetrics,
    /// Expert load metrics.
    pub experts: ExpertMetrics,
    /// Metrics of the time that executors spend in collectives.
    pub collectives: CollectiveMetrics,
    /// HTTP server metrics.
    pub http: HttpMetrics,
    /// Executor lifecycle metrics.
    pub executors: ExecutorLifecycleMetrics,
    /// Metrics of the queue of waiting requests.
    pub queue: QueueMetrics,
    /// Durations of grammar compilation and grammar bitmask computation, written by the grammar workers.
    pub grammar: Arc<GrammarTimings>,
    grammar_series: GrammarMetrics,
    /// Lifetime histograms of evicted KV blocks; `None` = block lifetimes are not sampled.
    pub block_lifetimes: Option<BlockLifetimeMetrics>,
    /// Number of requests whose submission to the scheduler is deferred until their grammar is compiled.
    pub deferred: AtomicU64,
    /// Counters of the KV-event publishers, by replica.
    pub kv_events: Vec<Arc<PublisherCounters>>,
    kv_event_series: kv_event_metrics::KvEventMetrics,
    replicas: ReplicaMetrics,
    process: ProcessMetrics,
    unused: UnsupportedFeatureMetrics,
    kv_cache: OnceLock<KvCacheInfo>,
}

impl ServerMetrics {
    /// Registers all series with the value zero.
    ///
    /// Errors: Prometheus rejects a name or a bucket list.
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
            block_lifetimes: block_lifetime_metrics(&families, config)?,
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

    /// Sets the KV cache properties. Only the first call has an effect.
    ///
    /// Errors: Prometheus rejects the name or the labels of the info series.
    pub fn set_kv_cache(&self, info: KvCacheInfo) -> Result<(), prometheus::Error> {
        if self.kv_cache.set(info).is_ok()
            && let Some(info) = self.kv_cache.get()
        {
            replicas::describe_cache(&MetricRegistrar::new(&self.registry, &self.config), info)?;
        }
        Ok(())
    }

    /// Returns the KV cache properties; `None` = not set yet.
    pub fn kv_cache(&self) -> Option<&KvCacheInfo> {
        self.kv_cache.get()
    }

    /// Renders the current metrics in Prometheus text format 0.0.4. `stats` has the statistics of each
    /// replica.
    ///
    /// Errors: none is known, because the format accepts every registered series.
    pub fn render(&self, stats: &[SchedulerStats]) -> Result<String, prometheus::Error> {
        let families = self.gather(stats);
        self.exposition.lock().unwrap_or_else(PoisonError::into_inner).write(&families)
    }

    fn gather(&self, stats: &[SchedulerStats]) -> Vec<prometheus::proto::MetricFamily> {
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

/// Registers the lifetime histograms of evicted KV blocks, if the configuration enables them.
fn block_lifetime_metrics(
    families: &MetricRegistrar<'_>,
    config: &MetricsConfig,
) -> Result<Option<BlockLifetimeMetrics>, prometheus::Error> {
    config.block_lifetimes.then(|| BlockLifetimeMetrics::new(families)).transpose()
}
