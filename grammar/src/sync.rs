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

/// Runs `test` in `interleavings` random interleavings of its threads. Each thread has a stack of 1 MiB, because the
/// default stack of 32 KiB is too small for the grammar compiler in a build without optimisation.
#[cfg(feature = "interleavings")]
pub fn check_interleavings(interleavings: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20;
    let scheduler = shuttle::scheduler::RandomScheduler::new(interleavings);
    shuttle::Runner::new(scheduler, config).run(test);
}
