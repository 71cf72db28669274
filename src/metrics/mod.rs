//! Figures of a server, for Prometheus and for people.
//!
//! Writers touch atomics where something happens: a step, a token, the end of a request. Whoever reads
//! takes what lies there; nobody is asked and nobody waits, so a scrape costs a step nothing.

mod buckets;
mod collectives;
mod experts;
mod exposition;
mod families;
mod grammar;
mod http;
mod kv_events;
mod life;
mod page;
mod process;
mod queue;
mod replicas;
mod request_times;
mod requests;
mod residency;
mod start_failure;
mod step_ring;
mod steps;
#[cfg(test)]
mod tests;
mod unused;

pub use buckets::{BucketsError, CustomBuckets};
pub use collectives::CollectiveMetrics;
pub use experts::ExpertMetrics;
pub use http::{HttpMetrics, OpenStream};
pub use life::LifeMetrics;
pub use page::{page, page_path};
pub use queue::QueueMetrics;
pub use request_times::RequestTimes;
pub use requests::{RequestMetrics, Round};
pub use residency::ResidencyMetrics;
pub use start_failure::StartFailure;
pub use step_ring::{STEPS_KEPT, StepRecord, StepRing};
pub use steps::{StepMetrics, StepPhase};

use crate::grammar::GrammarTimings;
use crate::kv_events::Figures;
use exposition::Exposition;
use families::Families;
use grammar::GrammarSeries;
use process::ProcessMetrics;
use prometheus::Registry;
use replicas::ReplicaMetrics;
use scheduler::StepStats;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use unused::UnusedMetrics;

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
    pub residency: bool,
    /// Most drafts of a row.
    pub drafts: u8,
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
            residency: false,
            drafts: 0,
            synthetic_acceptance: 0.0,
            buckets: CustomBuckets::default(),
        }
    }
}

/// What `vllm:cache_config_info` says, and what token counts are made of.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheFacts {
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
    pub seats: u32,
}

/// All figures of one server.
pub struct Metrics {
    registry: Registry,
    /// Updating and gathering belong together: counters are brought up by differences.
    reading: Mutex<()>,
    exposition: Mutex<Exposition>,
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
    pub life: LifeMetrics,
    /// Of requests that wait for a seat.
    pub queue: QueueMetrics,
    /// Of constrained output; whoever compiles grammars and makes masks writes here.
    pub grammar: Arc<GrammarTimings>,
    grammar_series: GrammarSeries,
    /// Of KV blocks that were evicted, if they are sampled.
    pub residency: Option<ResidencyMetrics>,
    /// Requests that wait outside the scheduler for their grammar.
    pub deferred: AtomicU64,
    /// Of the KV-event publishers, by replica.
    pub kv_events: Vec<Arc<Figures>>,
    kv_event_series: kv_events::KvEventSeries,
    replicas: ReplicaMetrics,
    process: ProcessMetrics,
    unused: UnusedMetrics,
    cache: OnceLock<CacheFacts>,
}

impl Metrics {
    /// Every series at zero.
    ///
    /// Errors: a name or bucket list that Prometheus does not take.
    pub fn new(config: &MetricsConfig) -> Result<Arc<Self>, prometheus::Error> {
        let registry = Registry::new();
        let families = Families::new(&registry, config);
        let grammar = Arc::new(GrammarTimings::default());
        let metrics = Self {
            requests: RequestMetrics::new(&families)?,
            steps: StepMetrics::new(&families)?,
            experts: ExpertMetrics::new(&families, &config.experts)?,
            collectives: CollectiveMetrics::new(&families, config.experts_shared)?,
            http: HttpMetrics::new(&families)?,
            life: LifeMetrics::new(&families)?,
            queue: QueueMetrics::new(&families)?,
            grammar_series: GrammarSeries::new(&families, &grammar)?,
            grammar,
            residency: config.residency.then(|| ResidencyMetrics::new(&families)).transpose()?,
            deferred: AtomicU64::new(0),
            kv_events: (0..families.replicas()).map(|_| Arc::default()).collect(),
            kv_event_series: kv_events::KvEventSeries::new(&families)?,
            replicas: ReplicaMetrics::new(&families, config)?,
            process: ProcessMetrics::new(&families)?,
            unused: UnusedMetrics::new(&families)?,
            cache: OnceLock::new(),
            reading: Mutex::new(()),
            exposition: Mutex::default(),
            config: config.clone(),
            registry: registry.clone(),
        };
        Ok(Arc::new(metrics))
    }

    /// Tells what the cache is like. Only the first call counts.
    ///
    /// Errors: as `new`.
    pub fn set_cache(&self, facts: CacheFacts) -> Result<(), prometheus::Error> {
        if self.cache.set(facts).is_ok()
            && let Some(facts) = self.cache.get()
        {
            replicas::describe_cache(&Families::new(&self.registry, &self.config), facts)?;
        }
        Ok(())
    }

    /// What the cache is like, once known.
    pub fn cache(&self) -> Option<&CacheFacts> {
        self.cache.get()
    }

    /// The page of this moment in Prometheus' text format 0.0.4; `stats` are those of every replica.
    ///
    /// Errors: never, as far as anybody knows: the format takes every series that was registered.
    pub fn render(&self, stats: &[StepStats]) -> Result<String, prometheus::Error> {
        let families = self.gather(stats);
        self.exposition.lock().unwrap_or_else(PoisonError::into_inner).write(&families)
    }

    fn gather(&self, stats: &[StepStats]) -> Vec<prometheus::proto::MetricFamily> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        self.replicas.set(stats, self.deferred.load(Ordering::Relaxed));
        self.grammar_series.set(&self.grammar);
        self.life.set(stats);
        self.queue.set();
        self.experts.set();
        self.kv_event_series.set(&self.kv_events);
        self.process.set();
        self.unused.set();
        self.registry.gather()
    }
}
