//! Locks, atomics and the shared map of what threads hand to each other: the system's, or, with the feature
//! `interleavings`, those of a scheduler that tests drive through orders that no machine happens to take.

#[cfg(not(feature = "interleavings"))]
pub(crate) use dashmap::DashMap;
#[cfg(feature = "interleavings")]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(feature = "interleavings")]
pub(crate) use shuttle_dashmap_impl::DashMap;
#[cfg(not(feature = "interleavings"))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};

use std::sync::PoisonError;

/// Takes a lock, whatever became of who had it before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
