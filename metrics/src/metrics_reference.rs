//! Generates `docs/observability/metrics.md` from the registered series, so that the page cannot differ from
//! them.

use super::{KvCacheInfo, MetricsConfig, ServerMetrics};
use prometheus::proto::{Metric, MetricFamily, MetricType};
use protocol::KvKind;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

/// Returns the path of the committed page, relative to the repository root.
pub fn page_path() -> &'static str {
    "docs/observability/metrics.md"
}

/// Labels whose values depend on the server; the page does not list the values.
const OPEN_LABELS: &[&str] = &[
    "model_name",
    "engine",
    "route",
    "code",
    "layer",
    "group",
    "rank",
    "block_size",
    "num_gpu_blocks",
    "cache_dtype",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "max_lora",
    "waiting_lora_adapters",
    "running_lora_adapters",
];

/// Returns the metrics of a server with all features.
fn metrics_of_all_features() -> Result<Arc<ServerMetrics>, prometheus::Error> {
    let config = MetricsConfig::new("MODEL", 1_000_000);
    let state = KvKind::State { slots_per_request: 1, bytes_per_slot: 1 };
    let config = MetricsConfig {
        tp_size: 2,
        experts: vec![1],
        experts_shared: true,
        block_lifetimes: true,
        kv_kinds: vec![KvKind::Full, KvKind::Mla, KvKind::Window { tokens: 1 }, state],
        ..config
    };
    let metrics = ServerMetrics::new(&config)?;
    metrics.set_kv_cache(KvCacheInfo {
        block_tokens: 16,
        blocks: 1,
        pool_tokens: 16,
        dtype: "auto".to_owned(),
        memory_utilization: 0.9,
        prefix_caching: true,
        max_num_seqs: 1,
    })?;
    Ok(metrics)
}

/// Renders the page from the series of a server with all features.
///
/// Errors: the errors of `ServerMetrics::new`.
pub fn reference_page() -> Result<String, prometheus::Error> {
    let metrics = metrics_of_all_features()?;
    let mut page = String::from(
        "# Metrics\n\nTL;DR: `GET /metrics` returns Prometheus text format 0.0.4. Names, labels and buckets \
         are vLLM's where vLLM has them; the prefix `hadron:` marks additional metrics. This page is generated from the \
         registered series; a test checks that it is current.\n\n\
         Every series exists from the start, except those of `hadron:http_requests_total`, which are created \
         with the first response of a route and status code. `hadron:expert_*` exist for models with \
         experts, `hadron:collective_seconds` with several ranks (`dp`: if replicas share experts), \
         `vllm:kv_block_*` with `--kv-cache-metrics`. Counters never decrease while the server runs. \
         Histograms have `_bucket`, `_sum` and `_count`; buckets of `request_*_tokens` end at the maximum model length.\n",
    );
    for prefix in ["vllm:", "hadron:", "process_"] {
        let title = prefix.trim_end_matches([':', '_']);
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            "\n## `{title}`\n\n| name | type | labels | meaning |\n|---|---|---|---|\n"
        );
        for family in metrics.gather(&[]).iter().filter(|f| f.name().starts_with(prefix)) {
            let (name, kind, help) = (family.name(), kind(family), family.help());
            let _ = writeln!(page, "| `{name}` | {kind} | {} | {help} |", labels(family));
        }
    }
    Ok(page)
}

fn kind(family: &MetricFamily) -> &'static str {
    match family.get_field_type() {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        MetricType::SUMMARY | MetricType::UNTYPED => "other",
    }
}

/// Renders the labels of a metric family, except `model_name` and `engine`, and the values of labels whose
/// values are fixed.
fn labels(family: &MetricFamily) -> String {
    let mut values: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for pair in family.get_metric().iter().flat_map(Metric::get_label) {
        values.entry(pair.name()).or_default().insert(pair.value());
    }
    let one = |(name, values): (&str, BTreeSet<&str>)| {
        if OPEN_LABELS.contains(&name) {
            return format!("`{name}`");
        }
        let values: Vec<&str> = values.into_iter().collect();
        format!("`{name}` = {}", values.join(", "))
    };
    values.into_iter().map(one).collect::<Vec<_>>().join("; ")
}
