//! Log of rejected requests: each 4xx reply with its reason. The log is rate-limited per reason, so that one
//! client cannot fill the log or suppress the log lines of other clients' rejections.

use super::api_error::ApiError;
use metrics::LogRateLimiter;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Maximum number of characters of an error message in the log.
const MESSAGE_CHARS_MAX: usize = 240;

/// Log of rejected requests.
#[derive(Debug, Default)]
pub struct RejectionLog {
    /// Rate limiters by error reason; the set of reasons is fixed.
    limiters: Mutex<BTreeMap<&'static str, LogRateLimiter>>,
}

impl RejectionLog {
    /// Logs a reply with a 4xx status in the current log span.
    pub(crate) fn log(&self, route: &str, error: &ApiError) {
        if !error.status.is_client_error() {
            return;
        }
        let Some(suppressed) = self.allow(error.reason, Instant::now()) else { return };
        tracing::warn!(
            route,
            status = error.status.as_u16(),
            reason = error.reason,
            error = logged_text(error),
            suppressed = (suppressed > 0).then_some(suppressed),
            "request rejected"
        );
    }

    fn allow(&self, reason: &'static str, now: Instant) -> Option<u64> {
        let mut limiters = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
        limiters.entry(reason).or_default().allow(now)
    }
}

/// Returns an error message on one line. The message may contain text sent by the client.
fn logged_text(error: &ApiError) -> String {
    let text = error.text();
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(MESSAGE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_rate_limit() {
        let (log, now) = (RejectionLog::default(), Instant::now());
        let allowed = (0..100).filter(|_| log.allow("invalid_value", now).is_some()).count();
        assert!(allowed > 0 && allowed < 100);
        assert_eq!(log.allow("unknown_route", now), Some(0));
    }

    #[test]
    fn logged_text_is_one_bounded_line() {
        let error = ApiError::invalid("stop", format!("a\nb\u{1b}[31m{}", "x".repeat(1_000)));
        let text = logged_text(&error);
        assert!(text.starts_with("stop: a b [31mxx"), "{text}");
        assert!(text.len() < 300 && !text.contains(char::is_control));
    }
}
