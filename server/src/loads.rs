//! `/v1/loads`: load of each replica in SGLang's format. `?include=steps` adds the timing records of the
//! latest steps, and `?dp_rank=N` selects one replica.

use super::api_error::ApiError;
use super::app::AppState;
use super::openai::endpoint::unix_time;
use super::query_parameters::{ExtractedQuery, QueryParameter, query_parameters};
use axum::Json;
use axum::extract::State;
use metrics::{KvCacheInfo, ServerMetrics, StepTimingRecord};
use scheduler::SchedulerStats;
use serde::Serialize;
use std::sync::Arc;
use std::time::SystemTime;
use text::strftime;

/// Maximum number of step records in a reply; the admin route `/debug/steps` returns all recorded steps.
const STEPS_SHOWN: usize = 64;

/// Timestamp format; timestamps are in UTC.
const RFC_3339: &str = "%Y-%m-%dT%H:%M:%SZ";

/// Query parameters of `/v1/loads`.
#[derive(Debug, Default)]
struct LoadsQuery {
    /// Whether the reply includes the timing records of the latest steps.
    steps: bool,
    /// DP rank of the only replica in the reply; `None` = all replicas.
    dp_rank: Option<u16>,
}

impl LoadsQuery {
    fn of(parameters: &[QueryParameter]) -> Result<Self, ApiError> {
        let mut query = Self::default();
        for QueryParameter { name, value } in parameters {
            match name.as_str() {
                "include" => query.steps = steps_included(value)?,
                "dp_rank" => {
                    let rank = value.parse();
                    let invalid = |_| ApiError::invalid("dp_rank", "must be a replica rank");
                    query.dp_rank = Some(rank.map_err(invalid)?);
                }
                _ => return Err(ApiError::unsupported(name, "unknown parameter")),
            }
        }
        Ok(query)
    }
}

/// Whether `include`, a comma-separated list of sections, contains `steps` or `all`. Section `core` is always
/// included.
fn steps_included(sections: &str) -> Result<bool, ApiError> {
    let mut include_steps = false;
    for section in sections.split(',').filter(|section| !section.is_empty()) {
        match section {
            "core" => {}
            "steps" | "all" => include_steps = true,
            _ => {
                let message = "must be a comma-separated list of core, steps and all";
                return Err(ApiError::invalid("include", message));
            }
        }
    }
    Ok(include_steps)
}

/// Reply of `/v1/loads`.
#[derive(Debug, Serialize)]
pub(crate) struct LoadsResponse {
    /// Time at which the loads were read, in RFC 3339.
    timestamp: String,
    version: &'static str,
    /// First served model name.
    model: String,
    /// Device names of the executors, in the order of their ranks.
    devices: Vec<String>,
    /// Seconds since the model was loaded.
    uptime_s: u64,
    dp_rank_count: usize,
    loads: Vec<ReplicaLoadEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<Vec<StepTimingRecord>>,
}

/// Load of one replica.
#[derive(Debug, Serialize)]
pub(crate) struct ReplicaLoadEntry {
    dp_rank: u16,
    /// Whether the executors of the replica are available.
    ready: bool,
    num_running_reqs: u32,
    num_waiting_reqs: u32,
    /// Number of prompt tokens and output tokens of the waiting requests. Cached prompt tokens are included,
    /// because prefix cache hits are determined only at admission.
    num_waiting_uncached_tokens: u64,
    num_total_reqs: u32,
    num_used_tokens: u64,
    max_total_num_tokens: u64,
    /// Fraction of the KV blocks in use, 0 to 1.
    token_usage: f64,
    /// Generated tokens per second, measured over the last second.
    gen_throughput: f64,
    /// Prefix hit rate since the start: tokens found in the prefix cache divided by tokens looked up.
    cache_hit_rate: f64,
    /// The greater of two fractions: used sequence slots, and used KV blocks.
    utilization: f64,
    max_running_requests: u32,
}

/// Handles `/v1/loads`.
pub(crate) async fn loads(
    State(app): State<Arc<AppState>>,
    query: ExtractedQuery,
) -> Result<Json<LoadsResponse>, ApiError> {
    let query = LoadsQuery::of(&query_parameters(query)?)?;
    let serving = app.serving()?;
    let metrics = &serving.metrics;
    let all = serving.client.replica_stats();
    let replicas = all.len();
    let loads = selected_loads(&all, query.dp_rank, metrics);
    if loads.is_empty() && query.dp_rank.is_some() {
        let message = format!("replica ranks are 0 to {}", replicas.saturating_sub(1));
        return Err(ApiError::invalid("dp_rank", message));
    }
    Ok(Json(LoadsResponse {
        timestamp: strftime(RFC_3339, SystemTime::now()),
        version: env!("CARGO_PKG_VERSION"),
        model: serving.card.names.first().to_owned(),
        devices: serving.devices.clone(),
        uptime_s: unix_time().saturating_sub(serving.card.created),
        dp_rank_count: replicas,
        loads,
        steps: query.steps.then(|| metrics.steps.ring.newest(STEPS_SHOWN)),
    }))
}

/// Returns the load of replica `dp_rank`, or of all replicas; empty before the KV cache is allocated.
fn selected_loads(
    all: &[SchedulerStats],
    dp_rank: Option<u16>,
    metrics: &ServerMetrics,
) -> Vec<ReplicaLoadEntry> {
    let Some(cache) = metrics.kv_cache() else { return Vec::new() };
    let throughput = |stats: &SchedulerStats| metrics.steps.throughput(stats.replica);
    let selected = all.iter().filter(|stats| dp_rank.is_none_or(|rank| rank == stats.replica.0));
    selected.map(|stats| load(stats, cache, throughput(stats))).collect()
}

fn load(stats: &SchedulerStats, cache: &KvCacheInfo, gen_throughput: f64) -> ReplicaLoadEntry {
    let in_use = u64::from(stats.blocks.in_use);
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let token_usage = share(f64::from(stats.blocks.in_use), f64::from(stats.blocks.pool));
    let (hits, queries) = (stats.prefix_hits_total as f64, stats.prefix_queries_total as f64);
    ReplicaLoadEntry {
        dp_rank: stats.replica.0,
        ready: stats.executors_ready,
        num_running_reqs: stats.running,
        num_waiting_reqs: stats.waiting,
        num_waiting_uncached_tokens: stats.waiting_tokens,
        num_total_reqs: stats.running + stats.waiting,
        num_used_tokens: in_use * cache.pool_tokens / u64::from(cache.blocks.max(1)),
        max_total_num_tokens: cache.pool_tokens,
        token_usage,
        gen_throughput,
        cache_hit_rate: share(hits, queries),
        utilization: token_usage
            .max(share(f64::from(stats.running), f64::from(cache.max_num_seqs))),
        max_running_requests: cache.max_num_seqs,
    }
}
