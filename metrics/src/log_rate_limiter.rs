//! Rate limit for log lines that clients or the operating system can cause any number of times.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of log lines of one limiter within `WINDOW`; further lines are suppressed.
const LINES_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_mins(1);

/// Rate limiter for one kind of log message: allows eight lines per minute and counts the suppressed ones.
#[derive(Debug, Default)]
pub struct LogRateLimiter(Mutex<RateLimitWindow>);

/// Start of the current time window, and the numbers of allowed and suppressed lines.
#[derive(Debug, Default)]
struct RateLimitWindow {
    /// Start of the current time window.
    since: Option<Instant>,
    /// Number of lines allowed in the current window.
    lines: u32,
    /// Number of lines suppressed since the last allowed one.
    unlogged: u64,
}

impl LogRateLimiter {
    /// Returns the number of lines suppressed before this one, or `None` if this line is suppressed.
    pub fn allow(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if window.since.is_none_or(|since| now.duration_since(since) >= WINDOW) {
            (window.since, window.lines) = (Some(now), 0);
        }
        if window.lines == LINES_MAX {
            window.unlogged += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_lines_a_minute_are_written_and_the_rest_counted() {
        let (limiter, start) = (LogRateLimiter::default(), Instant::now());
        let written = (0..1_000).filter(|_| limiter.allow(start).is_some()).count();
        assert_eq!(written, 8);
        assert_eq!(limiter.allow(start + Duration::from_secs(59)), None);
        let later = start + WINDOW;
        assert_eq!([(); 2].map(|()| limiter.allow(later)), [Some(993), Some(0)]);
    }
}
