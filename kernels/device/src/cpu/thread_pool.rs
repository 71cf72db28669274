//! Fork-join thread pool: all threads run the same closure (a parallel region), then wait for the next
//! region.
//!
//! A parallel region has an overhead of 1 to 2 µs. The calling thread publishes a closure and a region
//! number, runs the closure itself, and spins until the worker threads have finished. Workers spin briefly
//! between regions and then sleep, so that an idle process uses no CPU. The closure divides the work by
//! thread index.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

use crate::DeviceError;

/// Number of times that a worker polls for the next parallel region before it sleeps: about 100 µs, which is
/// longer than the gaps between the kernels of a step.
const SPINS_BEFORE_SLEEP: u32 = 4_000;
/// Number of times that the calling thread polls whether workers are still busy before it yields its core, on
/// which a worker may be waiting to run.
const SPINS_BEFORE_YIELD: u32 = 4_000;

/// Pointer to the closure that all threads of the pool run, with the thread index.
type PoolJob = *const (dyn Fn(usize) + Sync);

/// Fixed set of compute threads. The thread that calls [`ThreadPool::run`] also runs the closure, with the
/// index 0.
pub struct ThreadPool {
    shared: Arc<ThreadPoolState>,
    workers: Vec<JoinHandle<()>>,
    /// Serialises parallel regions: the calling thread holds the lock for the duration of a region.
    region_lock: Mutex<()>,
}

/// Value in separate cache lines, to avoid false sharing: workers poll the region number while other workers
/// decrement the counter of busy workers.
#[repr(align(128))]
struct CachePadded<T>(T);

/// State that the calling thread and the workers of a pool share.
struct ThreadPoolState {
    region: CachePadded<AtomicUsize>,
    busy: CachePadded<AtomicUsize>,
    job: UnsafeCell<Option<PoolJob>>,
    asleep: Vec<CachePadded<AtomicBool>>,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is written only while no worker is busy, and read only after a new region number was
// observed, which the writer publishes after `job`; the closure is `Sync` and outlives the region.
unsafe impl Send for ThreadPoolState {}
// SAFETY: the argument for `Send` covers shared access to `job`; the other fields are atomics.
unsafe impl Sync for ThreadPoolState {}

impl ThreadPool {
    /// Starts `threads - 1` worker threads; 0 is treated as 1.
    pub fn new(threads: usize) -> Result<Self, DeviceError> {
        let workers = threads.saturating_sub(1);
        let shared = Arc::new(ThreadPoolState {
            region: CachePadded(AtomicUsize::new(0)),
            busy: CachePadded(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            asleep: (0..workers).map(|_| CachePadded(AtomicBool::new(false))).collect(),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new(), region_lock: Mutex::new(()) };
        for index in 1..=workers {
            let shared = pool.shared.clone();
            let worker = std::thread::Builder::new()
                .name(format!("kernel-{index}"))
                .spawn(move || work(&shared, index))
                .map_err(|_| DeviceError::Thread { index })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Number of threads that run a parallel region, including the calling thread.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job(thread)` once on every thread, and returns after all calls have returned.
    ///
    /// # Panics
    /// If `job` panics on any thread. Regions do not nest: a job that calls `run` deadlocks.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let _region = self.region_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.publish(job, &self.workers);
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        self.shared.wait();
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a kernel thread panicked");
    }

    /// Splits `[0, items)` into one contiguous range per thread, and runs `job` on the ranges in parallel.
    /// The length of every range except the last is a multiple of `unit`. If there are fewer than `min_items`
    /// items, only the calling thread runs `job`, because waking the workers would take longer.
    pub fn split(
        &self,
        items: usize,
        unit: usize,
        min_items: usize,
        job: &(dyn Fn(Range<usize>) + Sync),
    ) {
        let threads = self.threads();
        if items < min_items || items <= unit || threads == 1 {
            return job(0..items);
        }
        let units = items.div_ceil(unit);
        self.run(&|thread| {
            let boundary = |t: usize| (units * t / threads * unit).min(items);
            let range = boundary(thread)..boundary(thread + 1);
            if !range.is_empty() {
                job(range);
            }
        });
    }
}

impl ThreadPoolState {
    fn publish(&self, job: &(dyn Fn(usize) + Sync), workers: &[JoinHandle<()>]) {
        // SAFETY: no worker is busy, so none reads `job`. The lifetime is erased; `wait` returns before the
        // borrow ends, and no worker accesses the closure after it has decremented `busy`.
        unsafe {
            *self.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), PoolJob>(job));
        }
        self.busy.0.store(workers.len(), Ordering::Relaxed);
        // This increment and the store to `asleep` are sequentially consistent, so that either the worker
        // observes the new region number or this thread observes `asleep`.
        self.region.0.fetch_add(1, Ordering::SeqCst);
        for (asleep, worker) in self.asleep.iter().zip(workers) {
            if asleep.0.load(Ordering::SeqCst) {
                wake(worker.thread());
            }
        }
    }

    fn wait(&self) {
        let mut spins = 0;
        while self.busy.0.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD {
                spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Waits until the number of the parallel region differs from `seen`, and returns the new number.
    fn next_region(&self, seen: usize, index: usize) -> usize {
        for _ in 0..SPINS_BEFORE_SLEEP {
            let region = self.region.0.load(Ordering::Acquire);
            if region != seen {
                return region;
            }
            spin_loop();
        }
        let asleep = &self.asleep[index - 1].0;
        asleep.store(true, Ordering::SeqCst);
        loop {
            let region = self.region.0.load(Ordering::SeqCst);
            if region != seen {
                asleep.store(false, Ordering::Relaxed);
                return region;
            }
            std::thread::park();
        }
    }
}

fn wake(thread: &Thread) {
    thread.unpark();
}

fn work(shared: &ThreadPoolState, index: usize) {
    let mut seen = 0;
    loop {
        seen = shared.next_region(seen, index);
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: a new region number was observed, so `job` is set and stays valid until this thread
        // decrements `busy`.
        let job = unsafe { (*shared.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && catch_unwind(AssertUnwindSafe(|| job(index))).is_err()
        {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.busy.0.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for ThreadPool {
    #[expect(clippy::disallowed_methods, reason = "the workers end after the current job")]
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.region.0.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            wake(worker.thread());
            // `join` returns no error here, because `run` has caught and reported panics of jobs.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    #[test]
    fn every_thread_runs_every_region_once() {
        for threads in [1, 2, 3, 5] {
            let pool = ThreadPool::new(threads).unwrap();
            let counts: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
            for _ in 0..200 {
                pool.run(&|t| {
                    counts[t].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 200));
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = ThreadPool::new(2).unwrap();
        let sum = AtomicU64::new(0);
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(3));
            pool.run(&|t| {
                sum.fetch_add(t as u64 + 1, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.load(Ordering::Relaxed), 15);
    }

    #[test]
    fn split_covers_each_item_once_at_unit_edges() {
        for threads in [1, 2, 3, 7] {
            let pool = ThreadPool::new(threads).unwrap();
            for (items, unit) in [(0, 4), (1, 4), (9, 4), (64, 16), (65, 16), (100, 1)] {
                let hits: Vec<AtomicU64> = (0..items).map(|_| AtomicU64::new(0)).collect();
                pool.split(items, unit, 0, &|range| {
                    assert_eq!(range.start % unit, 0);
                    for i in range {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn job_panic_reaches_caller_and_keeps_pool_usable() {
        let pool = ThreadPool::new(2).unwrap();
        for bad in 0..2 {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&|t| assert_ne!(t, bad))));
            assert!(caught.is_err());
        }
        pool.run(&|_| {});
    }
}
