//! A queue that many threads fill and one thread empties whole, sleeping while it is empty.
//!
//! Its length is bounded by admission: every entry belongs to a request in flight.

use grammar::sync::{Condvar, Mutex, lock};
use std::sync::PoisonError;
use std::time::Duration;

/// The queue.
#[derive(Debug)]
pub struct BatchInbox<T> {
    state: Mutex<BatchInboxState<T>>,
    arrived: Condvar,
}

#[derive(Debug)]
struct BatchInboxState<T> {
    items: Vec<T>,
    /// Whether the reader sleeps, so that a push to a busy reader costs no system call.
    sleeping: bool,
}

impl<T> Default for BatchInbox<T> {
    fn default() -> Self {
        let state = Mutex::new(BatchInboxState { items: Vec::new(), sleeping: false });
        Self { state, arrived: Condvar::new() }
    }
}

impl<T> BatchInbox<T> {
    /// Appends one item.
    pub fn push(&self, item: T) {
        self.push_all([item]);
    }

    /// Appends items that the reader then sees together.
    pub fn push_all(&self, items: impl IntoIterator<Item = T>) {
        let mut state = lock(&self.state);
        state.items.extend(items);
        let wake = state.sleeping && !state.items.is_empty();
        drop(state);
        if wake {
            self.arrived.notify_one();
        }
    }

    /// Moves everything to the end of `into`; waits up to `timeout` if there is nothing.
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
