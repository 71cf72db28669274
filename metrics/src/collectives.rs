//! Metrics of the time that executors spend in collectives such as all-reduce.

use super::histogram_buckets::HistogramFamily;
use super::metric_registrar::{MetricRegistrar, ReplicaOrSharedSeries};
use prometheus::{Error, Histogram};
use protocol::{CollectiveTiming, Replica};

const COLLECTIVE_SECONDS_HELP: &str = "Time that rank 0 of a replica spent in collectives per step: group tp = \
     the ranks of the replica, dp = the replicas that share experts. On CPUs it includes waiting for stragglers; \
     on GPUs it is the host time of the launches, and graph replays are not observed.";

/// Label values (`op`, `group`) of a series, and the function that reads the time of the series from a step's
/// collective timing.
type CollectiveTimingSeries = ([&'static str; 2], fn(&CollectiveTiming) -> u64);

const TENSOR_PARALLEL_SERIES: [CollectiveTimingSeries; 2] = [
    (["all_reduce", "tp"], |timing| timing.tp_all_reduce_ns),
    (["all_gather", "tp"], |timing| timing.tp_all_gather_ns),
];
const DATA_PARALLEL_SERIES: [CollectiveTimingSeries; 4] = [
    (["all_gather_rows", "dp"], |timing| timing.dp_all_gather_rows_ns),
    (["reduce_scatter", "dp"], |timing| timing.dp_reduce_scatter_ns),
    (["exchange_counts", "dp"], |timing| timing.dp_exchange_counts_ns),
    (["all_to_all", "dp"], |timing| timing.dp_all_to_all_ns),
];

/// Metrics of the collectives that a server uses; empty if no ranks communicate.
pub struct CollectiveMetrics {
    series: Vec<(ReplicaOrSharedSeries<Histogram>, CollectiveTimingSeries)>,
}

impl CollectiveMetrics {
    /// Registers the histograms of the collectives in use. `shared`: whether replicas share experts (expert
    /// parallelism across DP).
    pub(super) fn new(f: &MetricRegistrar<'_>, shared: bool) -> Result<Self, Error> {
        let ranks = TENSOR_PARALLEL_SERIES.into_iter().filter(|_| f.tp_size() > 1);
        let timings: Vec<CollectiveTimingSeries> =
            ranks.chain(DATA_PARALLEL_SERIES.into_iter().filter(|_| shared)).collect();
        if timings.is_empty() {
            return Ok(Self { series: Vec::new() });
        }
        let values: Vec<[&str; 2]> = timings.iter().map(|(values, _)| *values).collect();
        let (name, family) = ("hadron:collective_seconds", HistogramFamily::StepSeconds);
        let series =
            f.histograms_by(name, COLLECTIVE_SECONDS_HELP, family, ["op", "group"], &values)?;
        Ok(Self { series: series.into_iter().zip(timings).collect() })
    }

    /// Records the collective times of a completed step. Operations that the step did not call are not
    /// observed.
    pub fn step_completed(&self, replica: Replica, timing: &CollectiveTiming) {
        for (series, (_, duration_ns)) in &self.series {
            let ns = duration_ns(timing);
            if ns > 0 {
                series.of(replica).observe(ns as f64 * 1e-9);
            }
        }
    }
}
