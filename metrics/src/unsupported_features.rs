//! Series that vLLM dashboards expect, for features that this server does not have. Their values are fixed,
//! except for one gauge.

use super::metric_registrar::{InfoLabel, MetricRegistrar};
use prometheus::{Error, Gauge};
use std::time::{SystemTime, UNIX_EPOCH};

/// Gauge `vllm:lora_requests_info`: the only series of an unsupported feature with a value that changes.
/// The value is the Unix time of the scrape.
pub(super) struct UnsupportedFeatureMetrics {
    adapters: Gauge,
}

impl UnsupportedFeatureMetrics {
    #[rustfmt::skip] // One metric per line.
    pub(super) fn new(f: &MetricRegistrar<'_>) -> Result<Self, Error> {
        for (name, help) in [
            ("vllm:external_prefix_cache_queries_total", "Tokens looked up in external prefix caches: not supported, always 0."),
            ("vllm:external_prefix_cache_hits_total", "Tokens found in external prefix caches: not supported, always 0."),
            ("vllm:mm_cache_queries_total", "Multi-modal inputs looked up in a cache: not supported, always 0."),
            ("vllm:mm_cache_hits_total", "Multi-modal inputs found in a cache: not supported, always 0."),
        ] {
            f.counter_of_replicas(name, help)?;
        }
        let [awake, _, _] = f.gauges_of_replicas("vllm:engine_sleep_state", "1 for the sleep state of the engine; always awake.", "sleep_state", ["awake", "weights_offloaded", "discard_all"])?;
        for gauge in &awake {
            gauge.set(1.0);
        }
        let labels = [
            InfoLabel { name: "max_lora", value: "0" },
            InfoLabel { name: "waiting_lora_adapters", value: "" },
            InfoLabel { name: "running_lora_adapters", value: "" },
        ];
        Ok(Self { adapters: f.info("vllm:lora_requests_info", "LoRA adapters in use: not supported, always none. The value is the current Unix time.", &labels)? })
    }

    pub(super) fn update(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.adapters.set(now.map_or(0.0, |now| now.as_secs_f64()));
    }
}
