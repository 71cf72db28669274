//! Where parsing, templates and tokenising run: blocking threads, apart from the async runtime.
//!
//! Long texts share two places, so that they cannot keep short ones waiting; all are counted by
//! admission before they come here.

use super::api_error::ApiError;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tracing::Span;

/// Bodies above this are long: about 5 ms of tokenising.
const LONG_BYTES: usize = 16 << 10;
const LONG_PERMITS: usize = 2;
const SHORT_PERMITS: usize = 8;

/// The places.
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
    /// All places free.
    pub fn new() -> Self {
        let places = |count| Arc::new(Semaphore::new(count));
        Self { long: places(LONG_PERMITS), short: places(SHORT_PERMITS) }
    }

    /// Runs `work` on a text of `bytes` bytes.
    ///
    /// Errors: those of `work`; 500 if it panics. A caller that goes away gives up its place in the
    /// queue; work already begun runs to its end and is dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let places = if bytes > LONG_BYTES { &self.long } else { &self.short };
        let place = Arc::clone(places).acquire_owned().await.map_err(|_| ApiError::internal())?;
        let span = Span::current(); // The other thread writes to the log on behalf of the same request.
        let work = move || {
            let _place = place; // Held by the work, not by a caller that may leave.
            span.in_scope(work)
        };
        spawn_blocking(work).await.map_err(|panic| {
            tracing::error!(%panic, "text work panicked");
            ApiError::internal()
        })?
    }
}
