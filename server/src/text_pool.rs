//! Limits parsing, template rendering and tokenisation, which run on blocking threads, separate from the
//! async runtime.
//!
//! Long texts share `LONG_PERMITS` permits, so that they cannot delay short ones. The queue is bounded,
//! because admission control limits the number of requests.

use super::api_error::ApiError;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tracing::Span;

/// Size in bytes above which a request body counts as long; this corresponds to about 5 ms of tokenisation.
const LONG_BYTES: usize = 16 << 10;
const LONG_PERMITS: usize = 2;
const SHORT_PERMITS: usize = 8;

/// Limits the numbers of long texts and of short texts that are processed concurrently.
pub struct TextConcurrencyLimiter {
    long: Arc<Semaphore>,
    short: Arc<Semaphore>,
}

impl Default for TextConcurrencyLimiter {
    fn default() -> Self {
        Self::new()
    }
}

impl TextConcurrencyLimiter {
    /// Creates the limiter with all permits free.
    pub fn new() -> Self {
        let semaphore = |count| Arc::new(Semaphore::new(count));
        Self { long: semaphore(LONG_PERMITS), short: semaphore(SHORT_PERMITS) }
    }

    /// Runs `work` for a request body of `bytes` bytes on a blocking thread. If the caller drops the future,
    /// queued work is cancelled; running work continues, and its result is dropped.
    ///
    /// Errors: the errors of `work`; HTTP status 500 if `work` panics.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let semaphore = if bytes > LONG_BYTES { &self.long } else { &self.short };
        let permit =
            Arc::clone(semaphore).acquire_owned().await.map_err(|_| ApiError::internal())?;
        let span = Span::current(); // Log messages of the other thread belong to the same request.
        let work = move || {
            let _permit = permit; // `work` owns the permit, because the caller may drop the future.
            span.in_scope(work)
        };
        spawn_blocking(work).await.map_err(|panic| {
            tracing::error!(%panic, "text work panicked");
            ApiError::internal()
        })?
    }
}
