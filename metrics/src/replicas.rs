//! Metrics of replicas, copied from the statistics of the scheduler at each scrape.

use super::executor_lifecycle::CAUSES;
use super::kv_event_metrics::raise_to;
use super::kv_group_metrics::KvGroupMetrics;
use super::metric_registrar::{InfoLabel, MetricRegistrar};
use super::{KvCacheInfo, MetricsConfig};
use prometheus::{Error, Gauge, IntCounter};
use scheduler::{DRAFT_TOKENS_MAX, SchedulerStats};

/// Series of a metric by replica (value of the label `engine`).
type ReplicaSeries<T> = Vec<T>;
/// Function that reads the value of a counter from the statistics of a replica.
type ReplicaCounterFn = fn(&SchedulerStats) -> u64;
/// Function that reads the value of a gauge from the statistics of a replica.
type ReplicaGaugeFn = fn(&SchedulerStats) -> f64;

/// Metrics that are copied from the statistics of each replica.
pub(super) struct ReplicaMetrics {
    counters: Vec<(ReplicaSeries<IntCounter>, ReplicaCounterFn)>,
    gauges: Vec<(ReplicaSeries<Gauge>, ReplicaGaugeFn)>,
    usage: ReplicaSeries<Gauge>,
    waiting: ReplicaSeries<Gauge>,
    deferred: ReplicaSeries<Gauge>,
    groups: KvGroupMetrics,
}

impl ReplicaMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>, config: &MetricsConfig) -> Result<Self, Error> {
        let [capacity, deferred] = f.gauges_of_replicas("vllm:num_requests_waiting_by_reason", "Waiting requests, by reason.", "reason", ["capacity", "deferred"])?;
        let [free, cached, used, reserved] = f.gauges_of_replicas("hadron:kv_blocks", "KV blocks by state: vacant (free), cached, used; reserved blocks are also counted as vacant or cached.", "state", ["vacant", "cached", "used", "reserved"])?;
        let mut counters: Vec<(ReplicaSeries<IntCounter>, ReplicaCounterFn)> = vec![
            (f.counter_of_replicas("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.")?, |s| s.prefix_queries_total),
            (f.counter_of_replicas("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.")?, |s| s.prefix_hits_total),
            (f.counter_of_replicas("hadron:prefix_cache_window_misses_total", "Tokens by which prefix hits were shorter because the windows before their end or the states at their end were not cached.")?, |s| s.kv_group_hits_total.iter().map(|group| group.missed).sum()),
            (f.counter_of_replicas("vllm:num_preemptions_total", "Preempted requests.")?, |s| s.preemptions_total),
            (f.counter_of_replicas("vllm:generation_tokens_total", "Generated tokens.")?, |s| s.generated_tokens_total),
        ];
        let gauges: Vec<(ReplicaSeries<Gauge>, ReplicaGaugeFn)> = vec![
            (f.gauge_of_replicas("vllm:num_requests_running", "Running requests.")?, |s| f64::from(s.running)),
            (capacity, |s| f64::from(s.waiting)),
            (free, |s| f64::from(s.blocks.free)),
            (cached, |s| f64::from(s.blocks.cached)),
            (used, |s| f64::from(s.blocks.in_use)),
            (reserved, |s| f64::from(s.blocks.reserved)),
        ];
        counters.extend(prompt_counters(f)?);
        counters.extend(recompute_counters(f)?);
        counters.extend(spec_decode_counters(f, config.draft_tokens_max)?);
        let synthetic = f.gauge(
            "hadron:spec_decode_synthetic_acceptance_rate",
            "Synthetic acceptance rate of draft tokens in benchmarks; 0 = draft tokens are verified.",
        )?;
        synthetic.set(config.synthetic_acceptance);
        let usage = f.gauge_of_replicas("vllm:kv_cache_usage_perc", "KV cache usage: share of the KV blocks that requests use, 0 to 1.")?;
        let waiting = f.gauge_of_replicas("vllm:num_requests_waiting", "Waiting requests.")?;
        let groups = KvGroupMetrics::new(f, config)?;
        Ok(Self { counters, gauges, usage, waiting, deferred, groups })
    }

    /// Updates the series from `stats`, the statistics of all replicas. The number of `deferred` requests,
    /// whose grammar is being compiled, is added to the first replica, because they have no replica yet. If
    /// there are fewer series than replicas, the last series includes the remaining replicas: values are
    /// summed, and the KV cache usage is averaged.
    pub(super) fn update(&self, stats: &[SchedulerStats], deferred: u64) {
        if let Some(gauge) = self.deferred.first() {
            gauge.set(deferred as f64);
        }
        let series = self.usage.len();
        for engine in 0..series {
            let rest = if engine + 1 == series { stats.len() } else { engine + 1 };
            let Some(own) = stats.get(engine..rest) else { continue };
            for (counters, total) in &self.counters {
                raise_to(&counters[engine], own.iter().map(total).sum());
            }
            for (gauges, level) in &self.gauges {
                gauges[engine].set(own.iter().map(level).sum());
            }
            self.groups.update(engine, own);
            let deferred_requests = if engine == 0 { deferred } else { 0 };
            let waiting: f64 = own.iter().map(|stats| f64::from(stats.waiting)).sum();
            self.waiting[engine].set(waiting + deferred_requests as f64);
            let shares: f64 = own.iter().map(usage).sum();
            self.usage[engine].set(shares / own.len().max(1) as f64);
        }
    }
}

/// Registers the counters of prompt tokens: all prompt tokens, prompt tokens found in the prefix cache, and
/// prompt tokens by source.
#[rustfmt::skip] // One metric per line.
fn prompt_counters(f: &MetricRegistrar<'_>) -> Result<Vec<(ReplicaSeries<IntCounter>, ReplicaCounterFn)>, Error> {
    let [computed, hit, _external] = f.counters_of_replicas("vllm:prompt_tokens_by_source_total", "Prompt tokens of scheduled requests, by the source of their KV.", "source", ["local_compute", "local_cache_hit", "external_kv_transfer"])?;
    let [cached_hit, _cached_external] = f.counters_of_replicas("vllm:prompt_tokens_cached_by_source_total", "Prompt tokens found in a cache, by cache.", "source", ["local_cache_hit", "external_kv_transfer"])?;
    Ok(vec![
        (f.counter_of_replicas("vllm:prompt_tokens_total", "Prompt tokens of scheduled requests.")?, |s| s.prompt_tokens_total),
        (f.counter_of_replicas("vllm:prompt_tokens_cached_total", "Prompt tokens of scheduled requests that were found in the prefix cache.")?, |s| s.prompt_tokens_cached_total),
        (computed, |s| s.prompt_tokens_total - s.prompt_tokens_cached_total),
        (hit, |s| s.prompt_tokens_cached_total),
        (cached_hit, |s| s.prompt_tokens_cached_total),
    ])
}

/// Registers the counters of requests and tokens that were recomputed, by cause: executor failures,
/// preemptions and cache resets.
#[rustfmt::skip] // One metric per line.
fn recompute_counters(f: &MetricRegistrar<'_>) -> Result<Vec<(ReplicaSeries<IntCounter>, ReplicaCounterFn)>, Error> {
    let [exited, heartbeat_timeout, step_timeout, fault] = CAUSES;
    let recovered = f.counters_of_replicas("hadron:requests_recovered_total", "Running requests that were recovered after an executor failure, by cause.", "cause", CAUSES)?;
    let recomputed = f.counters_of_replicas("hadron:tokens_recomputed_total", "Tokens recomputed after an executor failure (by cause), a preemption, or a reset of the prefix cache.", "cause", [exited, heartbeat_timeout, step_timeout, fault, "preemption", "reset"])?;
    let requests: [ReplicaCounterFn; 4] = [
        |s| s.requests_recovered_total.exited,
        |s| s.requests_recovered_total.heartbeat_timeout,
        |s| s.requests_recovered_total.step_timeout,
        |s| s.requests_recovered_total.reported_fault,
    ];
    let tokens: [ReplicaCounterFn; 6] = [
        |s| s.tokens_recomputed_total.executor_failure.exited,
        |s| s.tokens_recomputed_total.executor_failure.heartbeat_timeout,
        |s| s.tokens_recomputed_total.executor_failure.step_timeout,
        |s| s.tokens_recomputed_total.executor_failure.reported_fault,
        |s| s.tokens_recomputed_total.preemption,
        |s| s.tokens_recomputed_total.reset,
    ];
    Ok(recovered.into_iter().zip(requests).chain(recomputed.into_iter().zip(tokens)).collect())
}

/// Registers the counters of speculative decoding; one draft position has a series even without speculative
/// decoding.
#[rustfmt::skip] // One metric per line.
fn spec_decode_counters(f: &MetricRegistrar<'_>, drafts: u8) -> Result<Vec<(ReplicaSeries<IntCounter>, ReplicaCounterFn)>, Error> {
    let mut counters: Vec<(ReplicaSeries<IntCounter>, ReplicaCounterFn)> = vec![
        (f.counter_of_replicas("vllm:spec_decode_num_drafts_total", "Drafts: rows with draft tokens.")?, |s| s.drafts_total.draft_rows),
        (f.counter_of_replicas("vllm:spec_decode_num_draft_tokens_total", "Draft tokens.")?, |s| s.drafts_total.draft_tokens),
        (f.counter_of_replicas("vllm:spec_decode_num_accepted_tokens_total", "Accepted draft tokens.")?, |s| s.drafts_total.accepted_per_position.iter().sum()),
    ];
    let positions = usize::from(drafts).clamp(1, DRAFT_TOKENS_MAX);
    let names: Vec<String> = (0..positions).map(|position| position.to_string()).collect();
    let names: Vec<[&str; 1]> = names.iter().map(|name| [name.as_str()]).collect();
    let by_position = f.counters_by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "Accepted draft tokens, by position in the draft.", ["position"], &names)?;
    counters.extend(by_position.iter().map(|series| series.iter().cloned().collect()).zip(ACCEPTED_BY_POSITION));
    Ok(counters)
}

/// Returns the number of accepted draft tokens at a draft position.
fn accepted_at_position<const POSITION: usize>(stats: &SchedulerStats) -> u64 {
    stats.drafts_total.accepted_per_position[POSITION]
}

/// Functions that read the number of accepted draft tokens, by draft position.
#[rustfmt::skip] // Eight draft positions per line.
const ACCEPTED_BY_POSITION: [ReplicaCounterFn; DRAFT_TOKENS_MAX] = [
    accepted_at_position::<0>, accepted_at_position::<1>, accepted_at_position::<2>, accepted_at_position::<3>, accepted_at_position::<4>, accepted_at_position::<5>, accepted_at_position::<6>, accepted_at_position::<7>,
    accepted_at_position::<8>, accepted_at_position::<9>, accepted_at_position::<10>, accepted_at_position::<11>, accepted_at_position::<12>, accepted_at_position::<13>, accepted_at_position::<14>, accepted_at_position::<15>,
];

/// Returns the fraction of the KV block pool that is in use.
fn usage(stats: &SchedulerStats) -> f64 {
    f64::from(stats.blocks.in_use) / f64::from(stats.blocks.pool.max(1))
}

/// Registers the info series that has the KV cache properties as labels.
pub(super) fn describe_cache(f: &MetricRegistrar<'_>, info: &KvCacheInfo) -> Result<(), Error> {
    let python = |yes: bool| if yes { "True" } else { "False" };
    f.info_of_replicas(
        "vllm:cache_config_info",
        "Configuration of the KV cache.",
        &[
            InfoLabel { name: "block_size", value: &info.block_tokens.to_string() },
            InfoLabel { name: "num_gpu_blocks", value: &info.blocks.to_string() },
            InfoLabel { name: "cache_dtype", value: &info.dtype },
            InfoLabel {
                name: "gpu_memory_utilization",
                value: &info.memory_utilization.to_string(),
            },
            InfoLabel { name: "enable_prefix_caching", value: python(info.prefix_caching) },
        ],
    )
}
