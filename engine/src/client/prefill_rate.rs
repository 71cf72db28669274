//! Prefill throughput: prefilled prompt tokens divided by the time during which prompts were queued. Time
//! without queued prompts does not count.

use std::time::{Duration, Instant};

/// Measurement window: the duration with queued prompts after which the newly measured rate replaces the
/// previous one.
const WINDOW: Duration = Duration::from_secs(1);

/// Measured prefill throughput, from which the retry time (`Retry-After`) of rejected requests is estimated.
#[derive(Debug, Default)]
pub(super) struct PrefillRate {
    /// Time up to which `queued_time` includes the elapsed time; `None` = no prompt is queued.
    counted_to: Option<Instant>,
    queued_time: Duration,
    tokens: u64,
    /// Measured rate of the last full window, in tokens per second.
    last: Option<f64>,
}

impl PrefillRate {
    /// Starts counting queued time, because a prompt is queued. No effect if queued time is already being
    /// counted.
    pub(super) fn prompt_queued(&mut self, now: Instant) {
        self.counted_to.get_or_insert(now);
    }

    /// Records that `done` prompt tokens were prefilled and that `left` prompt tokens are still queued.
    pub(super) fn record(&mut self, done: u64, left: u64, now: Instant) {
        let Some(before) = self.counted_to else { return };
        self.queued_time += now.saturating_duration_since(before);
        self.tokens += done;
        self.counted_to = (left > 0).then_some(now);
        if self.queued_time >= WINDOW {
            self.last = self.window_rate();
            (self.queued_time, self.tokens) = (Duration::ZERO, 0);
        }
    }

    /// Returns the estimated seconds to prefill `tokens` tokens; 0 until a rate has been measured.
    pub(super) fn seconds_for(&self, tokens: u64) -> f64 {
        let per_second = self.last.or_else(|| self.window_rate());
        per_second.map_or(0.0, |per_second| tokens as f64 / per_second.max(1.0))
    }

    fn window_rate(&self) -> Option<f64> {
        let seconds = self.queued_time.as_secs_f64();
        (seconds > 0.0 && self.tokens > 0).then(|| self.tokens as f64 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_not_counted() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut rate = PrefillRate::default();
        assert_eq!(rate.seconds_for(1_000), 0.0);
        rate.prompt_queued(at(0));
        rate.record(500, 0, at(500));
        assert_eq!(rate.seconds_for(10_000), 10.0, "rate of the incomplete first window");
        rate.prompt_queued(at(3_600_000));
        rate.prompt_queued(at(3_600_100));
        rate.record(1_000, 100, at(3_600_250));
        rate.record(0, 100, at(3_600_300));
        rate.record(500, 0, at(3_600_500));
        assert_eq!(rate.seconds_for(10_000), 5.0, "2,000 tokens in one second of queued time");
        rate.record(7, 0, at(3_700_000));
        assert_eq!(rate.seconds_for(10_000), 5.0, "no prompt was queued");
    }
}
