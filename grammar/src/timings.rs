//! What grammars took, as plain numbers that anyone may read at any time.

use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets, in microseconds; a last one takes the rest.
pub const BOUNDS_US: [u64; 12] =
    [10, 50, 100, 500, 1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000, 2_000_000];

/// Durations in buckets.
#[derive(Debug, Default)]
pub struct DurationHistogram {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

impl DurationHistogram {
    /// Adds one.
    pub fn record(&self, took: Duration) {
        let us = took.as_micros();
        let bucket = BOUNDS_US.iter().position(|&bound| us <= u128::from(bound));
        self.buckets[bucket.unwrap_or(BOUNDS_US.len())].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Durations in each bucket, not added up; the last holds those above all bounds.
    pub fn buckets(&self) -> [u64; BOUNDS_US.len() + 1] {
        self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed))
    }

    /// All of them together, in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9
    }
}

/// Counters of grammars since start (`grammar_compile_seconds`, `grammar_mask_seconds`).
#[derive(Debug, Default)]
pub struct GrammarTimings {
    /// Compiled; found in the cache is not counted.
    pub compiled: DurationHistogram,
    /// Refused.
    pub rejected: DurationHistogram,
    /// One mask of one row.
    pub masks: DurationHistogram,
    /// Masks that could not be made: their requests ended with `error`.
    pub masks_failed: AtomicU64,
    /// Masks that steps did not wait for.
    pub masks_overdue: AtomicU64,
}

/// Processor time of this thread.
pub(super) fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
