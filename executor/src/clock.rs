//! Times as reports have them.

use std::time::{Duration, Instant};

/// Nanoseconds from then on.
pub(crate) fn ns_since(start: Instant) -> u64 {
    ns(start.elapsed())
}

/// Nanoseconds.
pub(crate) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
