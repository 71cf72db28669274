//! Worker threads that compute token bitmasks (masks), and the queues of mask sessions that wait for these
//! threads.

use crate::limits::MASK_STACK_BYTES;
use crate::lower_priority;
use crate::mask_session::{MaskCommand, MaskEventListener, MaskSession};
use crate::sync::{Condvar, Mutex, lock};
use crate::timings::GrammarTimings;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, PoisonError};
use std::thread;

/// Minimum and maximum number of threads for requests with fast masks (token bitmasks).
const FAST_THREADS: std::ops::RangeInclusive<usize> = 2..=8;
/// Number of cores per thread for fast masks. Mask threads must leave most cores to the forward pass.
const CORES_PER_THREAD: usize = 4;
/// Minimum and maximum number of threads for requests with slow masks. A machine with few cores has one such
/// thread, so that a core remains for the threads that run steps.
const SLOW_THREADS: std::ops::RangeInclusive<usize> = 1..=2;

/// Worker threads for fast masks and for slow masks, and their queues.
pub(super) struct MaskWorkerPool {
    pub(super) fast: MaskSessionQueue,
    pub(super) slow: MaskSessionQueue,
    timings: Arc<GrammarTimings>,
    listener: MaskEventListener,
}

/// Queue of mask sessions (one per request) that wait for a worker thread.
#[derive(Default)]
pub(super) struct MaskSessionQueue {
    queue: Mutex<MaskSessionQueueState>,
    added: Condvar,
}

/// Waiting mask sessions, and whether the queue is closed.
#[derive(Default)]
struct MaskSessionQueueState {
    sessions: VecDeque<Arc<MaskSession>>,
    closed: bool,
}

impl MaskWorkerPool {
    pub(super) fn new(timings: Arc<GrammarTimings>, listener: MaskEventListener) -> Self {
        let (fast, slow) = (MaskSessionQueue::default(), MaskSessionQueue::default());
        Self { fast, slow, timings, listener }
    }

    /// Starts the worker threads; their number depends on the number of cores.
    ///
    /// Errors: a thread cannot be started.
    pub(super) fn start_threads(self: &Arc<Self>) -> io::Result<()> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let share = cores / CORES_PER_THREAD;
        let [fast_threads, slow_threads] =
            [FAST_THREADS, SLOW_THREADS].map(|range| share.clamp(*range.start(), *range.end()));
        for slow in (0..fast_threads + slow_threads).map(|i| i >= fast_threads) {
            let pool = Arc::clone(self);
            thread::Builder::new()
                .name(if slow { "grammar-slow" } else { "grammar-masks" }.to_owned())
                .stack_size(MASK_STACK_BYTES)
                .spawn(move || {
                    if slow {
                        lower_priority();
                    }
                    pool.run_worker(if slow { &pool.slow } else { &pool.fast });
                })?;
        }
        Ok(())
    }

    /// Passes a command to a session, and queues the session for a worker thread unless it is already queued.
    pub(super) fn enqueue(&self, session: &Arc<MaskSession>, command: MaskCommand) {
        if session.enqueue(command) {
            self.queue_for(session).add(Arc::clone(session));
        }
    }

    fn queue_for(&self, session: &MaskSession) -> &MaskSessionQueue {
        if session.is_slow() { &self.slow } else { &self.fast }
    }

    /// Closes the queues, which ends the worker threads.
    pub(super) fn close(&self) {
        self.fast.close();
        self.slow.close();
    }

    /// Runs the sessions in `queue` until the queue is closed.
    pub(super) fn run_worker(&self, queue: &MaskSessionQueue) {
        while let Some(session) = queue.next() {
            if session.run_commands(&self.timings, &self.listener) {
                self.queue_for(&session).add(session);
            }
        }
    }
}

impl MaskSessionQueue {
    pub(super) fn add(&self, session: Arc<MaskSession>) {
        lock(&self.queue).sessions.push_back(session);
        self.added.notify_one();
    }

    /// Waits until a mask session is queued, and returns it; `None` if the queue is closed.
    fn next(&self) -> Option<Arc<MaskSession>> {
        let queue = lock(&self.queue);
        let is_idle =
            |queue: &mut MaskSessionQueueState| queue.sessions.is_empty() && !queue.closed;
        let waited = self.added.wait_while(queue, is_idle);
        waited.unwrap_or_else(PoisonError::into_inner).sessions.pop_front()
    }

    fn close(&self) {
        let mut queue = lock(&self.queue);
        queue.sessions.clear();
        queue.closed = true;
        self.added.notify_all();
    }
}
