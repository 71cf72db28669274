//! Waits of tests for threads: each wait has a deadline and fails with a message.
//!
//! `clippy.toml` disallows the waits without a deadline.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::net::{TcpListener, TcpStream};
use std::sync::{Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Timeout of a wait for another thread. It is minutes long, because threads run emulated GPUs on machines under
/// load.
pub(crate) const THREAD_TIMEOUT: Duration = Duration::from_mins(15);

/// Waits until `done` returns true; panics with `what` after `limit`.
pub(crate) fn wait_until(limit: Duration, what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    start.elapsed()
}

/// Joins threads with a deadline.
pub(crate) trait BoundedJoin {
    /// Result of the thread.
    type Output;

    /// Waits up to `THREAD_TIMEOUT` for the end of the thread; panics if the thread runs longer or has panicked.
    fn join_bounded(self) -> Self::Output;
}

impl<T> BoundedJoin for JoinHandle<T> {
    type Output = T;

    #[track_caller]
    fn join_bounded(self) -> T {
        join_within(self, THREAD_TIMEOUT)
    }
}

#[track_caller]
#[expect(clippy::disallowed_methods, reason = "the thread has ended")]
fn join_within<T>(thread: JoinHandle<T>, limit: Duration) -> T {
    let start = Instant::now();
    while !thread.is_finished() {
        assert!(start.elapsed() < limit, "a thread still runs after {limit:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits up to `limit` for the next connection to a listener; panics if none arrives.
#[track_caller]
pub(crate) fn accept_within(listener: &TcpListener, limit: Duration) -> TcpStream {
    let mut accepted = None;
    listener.set_nonblocking(true).unwrap();
    wait_until(limit, "a connection", || {
        accepted = listener.accept().ok();
        accepted.is_some()
    });
    let (stream, _) = accepted.expect("the wait ended with a connection");
    stream.set_nonblocking(false).unwrap();
    stream
}

/// A barrier whose waits have a deadline: if a thread panics before it arrives, the others panic as well.
pub(crate) struct DeadlineBarrier {
    threads: usize,
    limit: Duration,
    state: Mutex<BarrierRound>,
    completed: Condvar,
}

/// Number of threads that have arrived in a round, and the number of the round.
#[derive(Default)]
struct BarrierRound {
    arrived: usize,
    number: u64,
}

impl DeadlineBarrier {
    /// Creates a barrier for `threads` threads.
    pub(crate) fn new(threads: usize) -> Self {
        let (state, completed) = (Mutex::default(), Condvar::new());
        Self { threads, limit: THREAD_TIMEOUT, state, completed }
    }

    /// Waits until all threads have arrived; returns true for the last one. Panics after the timeout.
    #[track_caller]
    pub(crate) fn wait(&self) -> bool {
        let mut round = self.state.lock().unwrap();
        round.arrived += 1;
        if round.arrived == self.threads {
            (round.arrived, round.number) = (0, round.number + 1);
            self.completed.notify_all();
            return true;
        }
        let number = round.number;
        let is_open = |round: &mut BarrierRound| round.number == number;
        let (round, waited) =
            self.completed.wait_timeout_while(round, self.limit, is_open).unwrap();
        let (arrived, threads) = (round.arrived, self.threads);
        drop(round); // A panic must not poison the state for the other threads.
        assert!(!waited.timed_out(), "{arrived} of {threads} threads arrived in {:?}", self.limit);
        false
    }
}

#[cfg(test)]
mod deadline_tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;

    fn panic_text<T>(run: impl FnOnce() -> T) -> String {
        let panic = catch_unwind(AssertUnwindSafe(run)).err().expect("a panic");
        panic.downcast_ref::<String>().expect("a formatted text").clone()
    }

    #[test]
    fn waits_for_threads_end_at_their_deadline() {
        let short = Duration::from_millis(20);
        let (end_sender, end_receiver) = channel::<()>();
        let thread = std::thread::spawn(move || end_receiver.recv_timeout(THREAD_TIMEOUT));
        assert_eq!(panic_text(|| join_within(thread, short)), "a thread still runs after 20ms");
        drop(end_sender);
        assert_eq!(std::thread::spawn(|| 7).join_bounded(), 7);
        assert_eq!(panic_text(|| wait_until(short, "x", || false)), "x: not within 20ms");
        let barrier = DeadlineBarrier { limit: short, ..DeadlineBarrier::new(2) };
        assert_eq!(panic_text(|| barrier.wait()), "1 of 2 threads arrived in 20ms");
    }

    #[test]
    fn barrier_completes_each_round_once() {
        let barrier = DeadlineBarrier::new(3);
        let rounds = || (0..50).filter(|_| barrier.wait()).count();
        let leaders: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(rounds)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(leaders, 50);
    }
}
