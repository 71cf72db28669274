//! Lines of the log that strangers can cause: some are told, the rest are counted.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines told within `WINDOW`.
const LINES_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_mins(1);

/// How often something was told lately.
#[derive(Debug, Default)]
pub(super) struct Seldom(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    /// Of the window that is open, if one is.
    since: Option<Instant>,
    lines: u32,
    /// Not told since the last line that was.
    untold: u64,
}

impl Seldom {
    /// Whether to tell what happens now: how many before it were not told; `None` = this is not, either.
    pub(super) fn tell(&self, now: Instant) -> Option<u64> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.since.is_none_or(|since| now.duration_since(since) >= WINDOW) {
            (told.since, told.lines) = (Some(now), 0);
        }
        if told.lines == LINES_MAX {
            told.untold += 1;
            return None;
        }
        told.lines += 1;
        Some(std::mem::take(&mut told.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_a_minute_are_told_and_the_rest_are_counted() {
        let (seldom, start) = (Seldom::default(), Instant::now());
        let told = (0..1_000).filter(|_| seldom.tell(start).is_some()).count();
        assert_eq!(told, 8);
        assert_eq!(seldom.tell(start + Duration::from_secs(59)), None);
        let later = start + WINDOW;
        assert_eq!([(); 2].map(|()| seldom.tell(later)), [Some(993), Some(0)]);
    }
}
