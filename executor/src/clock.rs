//! Times in nanoseconds, as reported.

use std::time::{Duration, Instant};

/// Nanoseconds since `start`.
pub(crate) fn ns_since(start: Instant) -> u64 {
    ns(start.elapsed())
}

/// `time` in nanoseconds, saturated.
pub(crate) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
