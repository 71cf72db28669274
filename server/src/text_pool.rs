//! Thread pool for parsing, template rendering and tokenisation: blocking threads, apart from the async
//! runtime.
//!
//! Long texts share `LONG_PERMITS` permits, so that they cannot delay short ones; all requests have passed
//! admission before they get here.

use super::api_error::ApiError;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tracing::Span;

/// Size in bytes above which a body is long: about 5 ms of tokenisation.
const LONG_BYTES: usize = 16 << 10;
const LONG_PERMITS: usize = 2;
const SHORT_PERMITS: usize = 8;

/// Permits for long and for short texts.
pub struct TextPool {
    long: Arc<Semaphore>,
    short: Arc<Semaphore>,
}

impl Default for TextPool {
    fn default() -> Self {
        Self::new()
    }
}

impl TextPool {
    /// Creates a pool with all permits free.
    pub fn new() -> Self {
        let semaphore = |count| Arc::new(Semaphore::new(count));
        Self { long: semaphore(LONG_PERMITS), short: semaphore(SHORT_PERMITS) }
    }

    /// Runs `work` on a text of `bytes` bytes.
    ///
    /// Errors: those of `work`; 500 if it panics. A caller that is dropped leaves the queue; work already
    /// started runs to its end, and its result is dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let semaphore = if bytes > LONG_BYTES { &self.long } else { &self.short };
        let permit =
            Arc::clone(semaphore).acquire_owned().await.map_err(|_| ApiError::internal())?;
        let span = Span::current(); // The other thread logs on behalf of the same request.
        let work = move || {
            let _permit = permit; // Owned by the work, because the caller may be dropped.
            span.in_scope(work)
        };
        spawn_blocking(work).await.map_err(|panic| {
            tracing::error!(%panic, "text work panicked");
            ApiError::internal()
        })?
    }
}
