//! Restart policy of failed executors: a pure function of failures, time and seed.
//!
//! Failures in service (after start-up) and failures during start-up are counted separately. After a failure
//! in service, executors restart immediately. If the failures in service within a time window exceed a limit,
//! the server ends, because the cause is then likely a request or a device. Failed starts are retried with
//! exponential back-off for some minutes, because weights may still be copied or a disk or device may be
//! busy.
//!
//! The policy reads no clock and draws no random numbers: callers pass the current time, measured from any
//! fixed time, and a seed for the jitter.

use std::collections::VecDeque;
use std::time::Duration;

/// Minimum number of consecutive failed starts before restarts are given up, regardless of the duration of
/// each start.
const FAILED_STARTS_MIN: u32 = 3;

/// Limits and back-off of executor restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Maximum number of failures in service (after start-up) within `service_window`; one more failure ends
    /// the server.
    pub service_failures_max: u32,
    /// Time window in which failures in service are counted.
    pub service_window: Duration,
    /// Back-off after the first failed start, before the jitter is applied.
    pub backoff_first: Duration,
    /// Maximum back-off between failed starts.
    pub backoff_max: Duration,
    /// Maximum time from the first failed start to the last retry. At least `FAILED_STARTS_MIN` starts are
    /// made, even if they take longer.
    pub give_up_after: Duration,
}

/// Stage in which executors fail; each stage has a separate failure limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureStage {
    /// The executors failed after they had reported that they are ready.
    InService,
    /// The executors failed before they had reported that they are ready.
    Starting,
}

/// Back-off and attempt number of the next start of a replica's executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartAttempt {
    /// Time to wait before the start (back-off).
    pub backoff: Duration,
    /// Number of this restart: the number of failures in service (after start-up) within the time window, or
    /// of consecutive failed starts.
    pub attempt: u32,
}

/// Reason why executors will not be restarted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestartsExhausted {
    /// The executors failed too often in service, that is, after start-up.
    #[error("executors failed {failures} times in {} minutes; last cause: {cause}", window.as_secs() / 60)]
    InService {
        /// Number of failures in service within the window, including the last one.
        failures: usize,
        /// Time window in which the failures occurred.
        window: Duration,
        /// Cause of the last failure.
        cause: String,
    },
    /// Too many consecutive starts failed before the executors were ready.
    #[error("{failures} restarts failed within {:.1} s; last cause: {cause}", elapsed.as_secs_f64())]
    Starting {
        /// Number of consecutive failed starts.
        failures: u32,
        /// Time since the first of the consecutive failed starts.
        elapsed: Duration,
        /// Cause of the last failure.
        cause: String,
    },
}

/// Failure history of one executor group, and the limits that apply to it.
#[derive(Debug)]
pub(super) struct RestartHistory {
    policy: RestartPolicy,
    /// State of the pseudorandom generator of the jitter.
    jitter: u64,
    /// Times of failures in service, oldest first.
    in_service: VecDeque<Duration>,
    failed_starts: Option<StartFailureStreak>,
}

/// Consecutive failed starts since the executors were last ready.
#[derive(Debug, Clone, Copy)]
struct StartFailureStreak {
    first: Duration,
    count: u32,
}

impl RestartHistory {
    /// Creates an empty history. `seed` determines the jitter.
    pub(super) fn new(policy: RestartPolicy, seed: u64) -> Self {
        Self { policy, jitter: seed, in_service: VecDeque::new(), failed_starts: None }
    }

    /// Records a failure at `now` with the given `cause`; returns when to restart.
    ///
    /// Errors: the executors have failed too often, or for too long.
    pub(super) fn failed(
        &mut self,
        stage: FailureStage,
        now: Duration,
        cause: &str,
    ) -> Result<RestartAttempt, RestartsExhausted> {
        match stage {
            FailureStage::InService => self.failed_in_service(now, cause),
            FailureStage::Starting => self.failed_to_start(now, cause),
        }
    }

    /// Resets the count of consecutive failed starts when the executors are ready. The recorded failures in
    /// service remain.
    pub(super) fn ready(&mut self) {
        self.failed_starts = None;
    }

    fn failed_in_service(
        &mut self,
        now: Duration,
        cause: &str,
    ) -> Result<RestartAttempt, RestartsExhausted> {
        let window = self.policy.service_window;
        while self.in_service.pop_front_if(|then| now.saturating_sub(*then) > window).is_some() {}
        self.in_service.push_back(now);
        let failures = self.in_service.len();
        if failures > self.policy.service_failures_max as usize {
            let cause = cause.to_owned();
            return Err(RestartsExhausted::InService { failures, window, cause });
        }
        Ok(RestartAttempt { backoff: Duration::ZERO, attempt: failures as u32 })
    }

    fn failed_to_start(
        &mut self,
        now: Duration,
        cause: &str,
    ) -> Result<RestartAttempt, RestartsExhausted> {
        let StartFailureStreak { first, count } =
            self.failed_starts.unwrap_or(StartFailureStreak { first: now, count: 0 });
        let count = count + 1;
        self.failed_starts = Some(StartFailureStreak { first, count });
        let elapsed = now.saturating_sub(first);
        let left = self.policy.give_up_after.saturating_sub(elapsed);
        if left.is_zero() && count >= FAILED_STARTS_MIN {
            let cause = cause.to_owned();
            return Err(RestartsExhausted::Starting { failures: count, elapsed, cause });
        }
        let backoff = self.next_backoff(count);
        // Shorten the back-off so that the last retry is made when `give_up_after` elapses, not later.
        let backoff = if left.is_zero() { backoff } else { backoff.min(left) };
        Ok(RestartAttempt { backoff, attempt: count })
    }

    /// Returns the back-off after `failures` failed starts: a random value between half and all of an
    /// exponentially growing duration. The jitter prevents servers that failed together from restarting
    /// together.
    fn next_backoff(&mut self, failures: u32) -> Duration {
        let doublings = (failures - 1).min(31);
        let whole = self.policy.backoff_first.saturating_mul(1 << doublings);
        let half = whole.min(self.policy.backoff_max) / 2;
        half + half.mul_f64(self.random_fraction())
    }

    /// Returns a pseudorandom number in [0, 1) (SplitMix64).
    fn random_fraction(&mut self) -> f64 {
        self.jitter = self.jitter.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.jitter;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FailureStage::{InService, Starting};

    const POLICY: RestartPolicy = RestartPolicy {
        service_failures_max: 3,
        service_window: Duration::from_mins(10),
        backoff_first: Duration::from_millis(500),
        backoff_max: Duration::from_secs(30),
        give_up_after: Duration::from_mins(5),
    };

    fn history(seed: u64) -> RestartHistory {
        RestartHistory::new(POLICY, seed)
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    /// Simulates executors whose every start fails after the time `each`. Returns the times of the restarts
    /// and the error that ends the restarts.
    fn start_times(policy: RestartPolicy, seed: u64, each: Duration) -> (Vec<Duration>, String) {
        let mut history = RestartHistory::new(policy, seed);
        let (mut now, mut starts) = (each, Vec::new());
        loop {
            match history.failed(Starting, now, "no such file") {
                Ok(next) => {
                    now += next.backoff;
                    starts.push(now);
                    now += each;
                }
                Err(exhausted) => return (starts, exhausted.to_string()),
            }
        }
    }

    #[test]
    fn fourth_failure_in_ten_minutes_exhausts_restarts() {
        let mut history = history(1);
        for attempt in 1..=3 {
            let next = history.failed(InService, seconds(1), "it exited").unwrap();
            assert_eq!(next, RestartAttempt { backoff: Duration::ZERO, attempt });
        }
        let error = history.failed(InService, seconds(2), "it exited again").unwrap_err();
        assert_eq!(
            error.to_string(),
            "executors failed 4 times in 10 minutes; last cause: it exited again"
        );
    }

    #[test]
    fn failures_in_service_count_for_ten_minutes() {
        let mut history = history(1);
        let at = |history: &mut RestartHistory, now| history.failed(InService, seconds(now), "");
        for now in [0, 300, 600] {
            assert!(at(&mut history, now).is_ok());
        }
        assert_eq!(
            at(&mut history, 601).unwrap().attempt,
            3,
            "the first failure has left the window"
        );
        assert!(at(&mut history, 602).is_err());
    }

    #[test]
    fn failed_starts_back_off_exponentially_up_to_a_limit() {
        for seed in 0..200 {
            let mut history = history(seed);
            let mut whole = POLICY.backoff_first;
            for attempt in 1..=12 {
                let next = history.failed(Starting, Duration::ZERO, "").unwrap();
                assert_eq!(next.attempt, attempt);
                assert!(whole / 2 <= next.backoff && next.backoff <= whole, "{seed}: {next:?}");
                whole = (2 * whole).min(POLICY.backoff_max);
            }
        }
    }

    #[test]
    fn backoff_jitter_follows_the_seed() {
        let of = |seed| start_times(POLICY, seed, Duration::ZERO).0;
        assert_eq!(of(7), of(7));
        let first: Vec<_> = (0..100).map(|seed| of(seed)[0]).collect();
        let range = first.iter().max().unwrap().abs_diff(*first.iter().min().unwrap());
        assert!(range > POLICY.backoff_first / 3, "{range:?}");
    }

    #[test]
    fn starts_that_fail_at_once_are_retried_for_minutes() {
        for seed in 0..100 {
            let (starts, why) = start_times(POLICY, seed, Duration::from_millis(77));
            assert!((12..40).contains(&starts.len()), "{seed}: {starts:?}");
            let last = *starts.last().unwrap();
            assert!(seconds(299) < last && last < seconds(303), "{seed}: {last:?}");
            assert!(why.ends_with("; last cause: no such file"), "{why}");
        }
    }

    #[test]
    fn slow_failing_starts_are_tried_three_times() {
        let (starts, why) = start_times(POLICY, 1, seconds(600));
        assert_eq!(starts.len(), 2, "after the one that failed first");
        assert!(why.starts_with("3 restarts failed within 12"), "{why}");
    }

    #[test]
    fn start_and_service_failures_are_counted_separately() {
        let mut history = history(1);
        for now in 0..20 {
            assert!(history.failed(Starting, seconds(now), "").is_ok());
        }
        assert_eq!(history.failed(InService, seconds(20), "").unwrap().attempt, 1);
        assert_eq!(history.failed(Starting, seconds(21), "").unwrap().attempt, 21);
        history.ready();
        assert_eq!(history.failed(Starting, seconds(22), "").unwrap().attempt, 1);
        assert_eq!(history.failed(InService, seconds(23), "").unwrap().attempt, 2);
    }

    #[test]
    fn zero_time_limit_still_allows_three_starts() {
        let policy = RestartPolicy { give_up_after: Duration::ZERO, ..POLICY };
        let (starts, why) = start_times(policy, 1, Duration::ZERO);
        assert_eq!(starts.len(), 2);
        assert!(starts[1] > starts[0] && !starts[0].is_zero(), "{starts:?}");
        assert!(why.starts_with("3 restarts failed"), "{why}");
    }
}
