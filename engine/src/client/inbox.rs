//! Queue with many producers and one consumer, which receives all queued items at once and sleeps while the
//! queue is empty.
//!
//! The queue has no limit of its own. In the engine's inbox, admission control bounds the messages of
//! requests, and executors add only replies to steps in flight and periodic heartbeats.

use grammar::sync::{Condvar, Mutex, lock};
use std::sync::PoisonError;
use std::time::Duration;

/// Multi-producer queue whose consumer receives all queued items at once.
#[derive(Debug)]
pub struct BulkInbox<T> {
    state: Mutex<BulkInboxState<T>>,
    arrived: Condvar,
}

/// Queued items of a bulk inbox, and whether the consumer sleeps.
#[derive(Debug)]
struct BulkInboxState<T> {
    items: Vec<T>,
    /// Whether the consumer sleeps in `drain`. If it is awake, a push makes no system call.
    sleeping: bool,
}

impl<T> Default for BulkInbox<T> {
    fn default() -> Self {
        let state = Mutex::new(BulkInboxState { items: Vec::new(), sleeping: false });
        Self { state, arrived: Condvar::new() }
    }
}

impl<T> BulkInbox<T> {
    /// Appends an item.
    pub fn push(&self, item: T) {
        self.push_all([item]);
    }

    /// Appends items; the consumer receives all of them in one call of `drain`.
    pub fn push_all(&self, items: impl IntoIterator<Item = T>) {
        let mut state = lock(&self.state);
        state.items.extend(items);
        let wake = state.sleeping && !state.items.is_empty();
        drop(state);
        if wake {
            self.arrived.notify_one();
        }
    }

    /// Moves all queued items to the end of `into`. If the queue is empty, waits up to `timeout` for items.
    pub fn drain(&self, into: &mut Vec<T>, timeout: Duration) {
        let mut state = lock(&self.state);
        if state.items.is_empty() {
            state.sleeping = true;
            let wait = self.arrived.wait_timeout_while(state, timeout, |s| s.items.is_empty());
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
            state.sleeping = false;
        }
        into.append(&mut state.items);
    }
}
