//! Flags of the Prometheus metrics at `/metrics`.

use clap::Args;

use scheduler::LifetimeSampleRate;

use metrics::CustomBuckets;

/// Default fraction of KV blocks whose lifetime is measured, as in vLLM.
const KV_CACHE_METRICS_SAMPLE_DEFAULT: f64 = 0.01;

/// Flags of the Prometheus metrics.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Metrics")]
pub struct MetricsArgs {
    /// Aggregate all replicas into one series engine="0": sums, and means of fractions
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub metrics_aggregate: bool,
    /// Histogram bounds by family, such as {"request_latency": [0.1, 1, 10]}
    #[arg(long, value_name = "JSON")]
    pub custom_histogram_buckets: Option<CustomBuckets>,
    /// Measure the lifetime of KV blocks: vllm:kv_block_*
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          action = clap::ArgAction::Set, value_name = "BOOL")]
    kv_cache_metrics: Option<bool>,
    /// Fraction of blocks whose lifetime is measured, above 0 and at most 1; implies --kv-cache-metrics
    /// [default: 0.01]
    #[arg(long, value_parser = fraction, value_name = "FRACTION")]
    kv_cache_metrics_sample: Option<f64>,
}

impl MetricsArgs {
    /// Returns the fraction of KV blocks whose lifetime is measured; `None` = lifetimes are not measured.
    pub fn block_lifetime_sample_rate(&self) -> Option<LifetimeSampleRate> {
        let is_measured = self.kv_cache_metrics.unwrap_or(self.kv_cache_metrics_sample.is_some());
        LifetimeSampleRate::new(
            self.kv_cache_metrics_sample.unwrap_or(KV_CACHE_METRICS_SAMPLE_DEFAULT),
        )
        .filter(|_| is_measured)
    }
}

fn fraction(text: &str) -> Result<f64, String> {
    let fraction =
        text.parse().ok().filter(|&fraction| LifetimeSampleRate::new(fraction).is_some());
    fraction.ok_or_else(|| "not a fraction above 0 and at most 1, such as 0.01".to_owned())
}
