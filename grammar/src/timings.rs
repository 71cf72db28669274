//! Histograms of the durations of compilations and masks, as atomic counters that any thread may read.

use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the histogram buckets in microseconds; one further bucket counts larger values.
pub const BOUNDS_US: [u64; 12] =
    [10, 50, 100, 500, 1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000, 2_000_000];

/// Histogram of durations.
#[derive(Debug, Default)]
pub struct DurationHistogram {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

impl DurationHistogram {
    /// Adds the duration `took` to the histogram.
    pub fn record(&self, took: Duration) {
        let us = took.as_micros();
        let bucket = BOUNDS_US.iter().position(|&bound| us <= u128::from(bound));
        self.buckets[bucket.unwrap_or(BOUNDS_US.len())].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns the number of durations in each bucket (not cumulative); the last bucket counts durations
    /// above all bounds.
    pub fn buckets(&self) -> [u64; BOUNDS_US.len() + 1] {
        self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed))
    }

    /// Returns the sum of all durations in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9
    }
}

/// Grammar metrics since start (`grammar_compile_seconds`, `grammar_mask_seconds`).
#[derive(Debug, Default)]
pub struct GrammarTimings {
    /// Durations of successful compilations, excluding cache hits.
    pub compiled: DurationHistogram,
    /// Durations of failed compilations.
    pub rejected: DurationHistogram,
    /// Durations of token bitmask computations, one duration per bitmask.
    pub masks: DurationHistogram,
    /// Number of failed token bitmask computations; the affected requests ended with `error`.
    pub masks_failed: AtomicU64,
    /// Number of masks that were not ready at the deadline of their step, so that the step proceeded
    /// without them.
    pub masks_overdue: AtomicU64,
}

/// Returns the processor time of the calling thread.
pub(super) fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
