//! Pool of idle HTTP connections, and a helper that runs requests with bounded concurrency.

use std::future::Future;
use std::sync::Mutex;

use futures::{StreamExt as _, stream};

use crate::progress::ProgressReporter;

/// Idle connections to a server. The connection that was used last is reused first.
#[derive(Debug)]
pub struct IdleConnections<T>(Mutex<Vec<T>>);

impl<T> Default for IdleConnections<T> {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<T> IdleConnections<T> {
    /// Removes an idle connection from the pool, if there is one.
    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().ok()?.pop()
    }

    /// Adds an idle connection to the pool.
    pub(super) fn put(&self, connection: T) {
        if let Ok(mut idle) = self.0.lock() {
            idle.push(connection);
        }
    }
}

/// Runs `work` for all items, for at most `concurrency` items at a time. Returns the results in the order of
/// the items.
pub async fn run_limited<I, T, F>(
    items: Vec<I>,
    concurrency: usize,
    progress: &ProgressReporter,
    work: impl Fn(I) -> F,
) -> Vec<T>
where
    F: Future<Output = T>,
{
    let counted = |item| {
        let result = work(item);
        async move {
            let result = result.await;
            progress.add(1);
            result
        }
    };
    stream::iter(items).map(counted).buffered(concurrency.max(1)).collect().await
}
