//! Locks and atomics of what threads hand to each other: the system's, or, with the feature
//! `interleavings`, those of a scheduler that tests drive through orders that no machine happens to take.

#[cfg(feature = "interleavings")]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(feature = "interleavings"))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};

use std::sync::PoisonError;

/// Takes a lock, whatever became of who had it before.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
