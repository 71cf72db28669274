//! How often the executors of a replica may be started again before the server gives up.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Restarts within `WINDOW` before the server gives up.
const RESTARTS_MAX: usize = 3;
const WINDOW: Duration = Duration::from_mins(10);

/// There will be no executors any more: they were lost too often.
#[derive(Debug, thiserror::Error)]
#[error("lost {} times in {} minutes, the last time because {cause}", RESTARTS_MAX + 1,
        WINDOW.as_secs() / 60)]
pub struct TooOften {
    /// The last loss.
    pub cause: String,
}

/// The restarts of one replica.
#[derive(Debug, Default)]
pub struct Restarts(VecDeque<Instant>);

impl Restarts {
    /// Another one, because of this. Returns how many of them are not long ago.
    ///
    /// Errors: too many.
    pub fn count(&mut self, cause: &str) -> Result<usize, TooOften> {
        let now = Instant::now();
        while self.0.pop_front_if(|then| now.duration_since(*then) > WINDOW).is_some() {}
        if self.0.len() >= RESTARTS_MAX {
            return Err(TooOften { cause: cause.to_owned() });
        }
        self.0.push_back(now);
        Ok(self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_in_ten_minutes_are_the_last() {
        let mut restarts = Restarts::default();
        for attempt in 1..=3 {
            assert_eq!(restarts.count("it died").unwrap(), attempt);
        }
        let error = restarts.count("it died again").unwrap_err().to_string();
        assert_eq!(error, "lost 4 times in 10 minutes, the last time because it died again");
    }
}
