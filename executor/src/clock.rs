//! Conversion of durations to nanoseconds, the unit in which executors report durations.

use std::time::{Duration, Instant};

/// Returns the nanoseconds since `start`.
pub(crate) fn ns_since(start: Instant) -> u64 {
    ns(start.elapsed())
}

/// Returns `time` in nanoseconds, at most `u64::MAX`.
pub(crate) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
