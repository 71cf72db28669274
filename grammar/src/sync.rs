//! Locks and atomics for code that is tested with random thread interleavings. The types come from the
//! standard library or, with the feature `interleavings`, from the crate `shuttle`, which also explores
//! interleavings that rarely occur on a real machine.

#[cfg(feature = "interleavings")]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(feature = "interleavings"))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};

use std::sync::PoisonError;

/// Locks a mutex, ignoring poisoning.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
