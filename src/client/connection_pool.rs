//! Pool of idle connections, and bounded concurrency over a list of requests.

use std::future::Future;
use std::sync::Mutex;

use futures::{StreamExt as _, stream};

use crate::progress::ProgressReporter;

/// Idle connections; the most recently used one is taken first.
#[derive(Debug)]
pub struct IdleConnections<T>(Mutex<Vec<T>>);

impl<T> Default for IdleConnections<T> {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<T> IdleConnections<T> {
    /// Takes a connection, if there is one.
    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().ok()?.pop()
    }

    /// Returns a connection to the pool.
    pub(super) fn put(&self, connection: T) {
        if let Ok(mut idle) = self.0.lock() {
            idle.push(connection);
        }
    }
}

/// Runs `work` for all items, at most `concurrency` at a time. Returns the results in the order of the items.
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
