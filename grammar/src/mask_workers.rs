//! Worker threads that compute the masks of live requests while the device runs a step, and isolation of slow
//! requests.
//!
//! - A step waits for its masks for its expected duration and a 20th more. Then its rows with overdue masks
//!   return no sampled token and are scheduled again when their masks are ready
//!   (`SchedulerEvent::MaskReady`).
//! - Requests with slow masks are processed by separate threads of lower priority. The speed of a grammar's
//!   masks, once measured by one request, applies to later requests. The slow threads also drop the guides of
//!   ended requests, so that the scheduler thread never does.
//! - A mask that exceeds `MASK_TIME` is cancelled, and a request that exceeds its processor-time budget gets
//!   no more masks. Both result in a mask that allows no token, which ends only that request.

#[cfg(all(test, feature = "interleavings"))]
mod interleavings;

use super::decoding_guide::DecodingGuide;
use super::limits::{MASK_STACK_BYTES, MASK_TIME, mask_grace_period};
use super::lower_priority;
use super::mask_session::{MaskCommand, MaskEvent, MaskEventListener, MaskSession};
use super::step_mask_collector::StepMaskCollector;
use super::timings::GrammarTimings;
use crate::sync::{Condvar, Mutex, lock};
use protocol::{Batch, ExecutorCommand, RequestId, StepId, Token};
use scheduler::{SchedulerEffect, TokenEvent};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel};
use std::sync::{Arc, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Minimum and maximum number of threads for requests with fast masks.
const FAST_THREADS: std::ops::RangeInclusive<usize> = 2..=8;
/// Number of cores per thread for fast masks: mask threads must not take the cores of the forward pass.
const CORES_PER_THREAD: usize = 4;
/// Minimum and maximum number of threads for requests with slow masks. On machines with few cores there is
/// one, so that the threads that run steps keep a core.
const SLOW_THREADS: std::ops::RangeInclusive<usize> = 1..=2;
/// Number of tokens that are passed to a session at a time before its first masked token: passing each token
/// would cost time although no mask is needed yet.
const TOKENS_BUFFERED_MAX: usize = 64;
/// Interval of the check for overdue masks.
const OVERDUE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Row of a batch that needs a grammar bitmask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskedRow {
    /// Index of the row in the batch.
    pub row: u32,
    /// Request that the row belongs to.
    pub request: RequestId,
}

/// Handle of the mask workers, owned by the engine thread.
pub struct MaskWorkers {
    live: HashMap<RequestId, LiveMaskSession>,
    pool: Arc<MaskWorkerPool>,
    timer: Sender<MaskTimerEvent>,
}

struct LiveMaskSession {
    session: Arc<MaskSession>,
    /// Number of output tokens so far.
    output_tokens: u32,
    /// Number of output tokens before the first one that a mask may restrict.
    first_masked_token: u32,
    /// Newest output tokens, not yet passed to the session.
    buffered: Vec<Token>,
}

struct MaskWorkerPool {
    fast: MaskSessionQueue,
    slow: MaskSessionQueue,
    timings: Arc<GrammarTimings>,
    listener: MaskEventListener,
}

/// Queue of sessions that wait for a worker thread.
#[derive(Default)]
struct MaskSessionQueue {
    queue: Mutex<MaskSessionQueueState>,
    added: Condvar,
}

#[derive(Default)]
struct MaskSessionQueueState {
    sessions: VecDeque<Arc<MaskSession>>,
    closed: bool,
}

/// Message to the timer thread.
enum MaskTimerEvent {
    /// A request started; the timer checks from now on whether its masks exceed `MASK_TIME`.
    Begin(Weak<MaskSession>),
    /// A step waits for its masks until a deadline.
    Step(Instant, Arc<StepMaskCollector>),
}

impl MaskWorkers {
    /// Starts the threads. `listener` is called for masks that a step did not wait for, when they are ready,
    /// and for requests that need no more masks.
    ///
    /// Errors: a thread cannot be started.
    pub fn start(
        timings: &Arc<GrammarTimings>,
        listener: impl Fn(RequestId, MaskEvent) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let pool = Arc::new(MaskWorkerPool {
            fast: MaskSessionQueue::default(),
            slow: MaskSessionQueue::default(),
            timings: Arc::clone(timings),
            listener: Arc::new(listener),
        });
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let share = cores / CORES_PER_THREAD;
        let [fast_threads, slow_threads] =
            [FAST_THREADS, SLOW_THREADS].map(|range| share.clamp(*range.start(), *range.end()));
        for slow in (0..fast_threads + slow_threads).map(|i| i >= fast_threads) {
            let pool = Arc::clone(&pool);
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
        let (timer, timer_events) = channel();
        let timings = Arc::clone(timings);
        let run = move || MaskTimer::default().run(&timer_events, &timings);
        thread::Builder::new().name("grammar-timer".to_owned()).spawn(run)?;
        Ok(Self { live: HashMap::new(), pool, timer })
    }

    /// Registers a request whose output follows `guide`. Call it before the request is submitted.
    pub fn begin(&mut self, request: RequestId, guide: DecodingGuide) {
        let first_masked_token = guide.first_masked_token().unwrap_or(u32::MAX);
        let session = Arc::new(MaskSession::new(request, guide));
        self.notify_timer(MaskTimerEvent::Begin(Arc::downgrade(&session)));
        self.live.insert(
            request,
            LiveMaskSession { session, output_tokens: 0, first_masked_token, buffered: Vec::new() },
        );
    }

    /// Passes the tokens that a tick committed to the sessions. Call it before a batch of the tick is sent:
    /// the masks of the batch depend on these tokens.
    pub fn observe_effects(&mut self, effects: &[SchedulerEffect]) {
        if self.live.is_empty() {
            return;
        }
        for effect in effects {
            if let SchedulerEffect::TokenEvents(events) = effect {
                for event in events {
                    self.observe_event(event);
                }
            }
        }
    }

    fn observe_event(&mut self, event: &TokenEvent) {
        if event.finish_reason.is_some() {
            if let Some(LiveMaskSession { session, .. }) = self.live.remove(&event.request)
                && session.end()
            {
                self.pool.slow.add(session);
            }
        } else if let Some(live) = self.live.get_mut(&event.request)
            && !event.tokens.is_empty()
        {
            live.output_tokens += event.tokens.len() as u32;
            if live.session.is_done() {
                return;
            }
            live.buffered.extend_from_slice(&event.tokens);
            if live.output_tokens >= live.first_masked_token
                || live.buffered.len() >= TOKENS_BUFFERED_MAX
            {
                let tokens = live.buffered.as_slice().into();
                live.buffered.clear();
                self.pool.enqueue(&live.session, MaskCommand::Tokens(tokens));
            }
        }
    }

    /// Returns the masked rows of a batch.
    pub fn masked_rows(&self, batch: &Batch) -> Vec<MaskedRow> {
        if self.live.is_empty() {
            return Vec::new();
        }
        let rows = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        rows.map(|(index, row)| MaskedRow { row: index, request: row.request }).collect()
    }

    /// Requests the masks of a batch that was just sent to `executor` and is expected to take `expected`.
    pub fn request_masks(
        &self,
        step: StepId,
        rows: Vec<MaskedRow>,
        executor: &SyncSender<ExecutorCommand>,
        expected: Duration,
    ) {
        let deadline = Instant::now() + expected + mask_grace_period(expected);
        let waiting = rows.iter().map(|masked| masked.row).collect();
        let step = Arc::new(StepMaskCollector::new(step, executor.clone(), waiting));
        for MaskedRow { row, request } in rows {
            let live = self.live.get(&request);
            let ready =
                live.map_or(Some(Vec::new()), |live| live.session.ready_mask(live.output_tokens));
            match (ready, live) {
                (None, Some(live)) => {
                    self.pool.enqueue(&live.session, MaskCommand::Compute(Arc::clone(&step), row));
                }
                // A request without a session is allowed no token.
                (ready, _) => drop(step.put(row, ready.unwrap_or_default())),
            }
        }
        if !step.is_complete() {
            self.notify_timer(MaskTimerEvent::Step(deadline, step));
        }
    }

    fn notify_timer(&self, event: MaskTimerEvent) {
        let _ = self.timer.send(event); // The timer thread runs until this sender is dropped.
    }
}

impl Drop for MaskWorkers {
    fn drop(&mut self) {
        for live in self.live.values() {
            live.session.end();
        }
        self.pool.fast.close();
        self.pool.slow.close();
    }
}

impl MaskWorkerPool {
    fn enqueue(&self, session: &Arc<MaskSession>, command: MaskCommand) {
        if session.enqueue(command) {
            self.queue_for(session).add(Arc::clone(session));
        }
    }

    fn queue_for(&self, session: &MaskSession) -> &MaskSessionQueue {
        if session.is_slow() { &self.slow } else { &self.fast }
    }

    /// Runs the sessions of a queue until it is closed.
    fn run_worker(&self, queue: &MaskSessionQueue) {
        while let Some(session) = queue.next() {
            if session.run_commands(&self.timings, &self.listener) {
                self.queue_for(&session).add(session);
            }
        }
    }
}

impl MaskSessionQueue {
    fn add(&self, session: Arc<MaskSession>) {
        lock(&self.queue).sessions.push_back(session);
        self.added.notify_one();
    }

    /// Waits for a session and returns it; `None` = the queue is closed.
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

/// Timer that sends the masks of a step at its deadline and cancels overdue masks.
#[derive(Default)]
struct MaskTimer {
    /// Steps ordered by their deadline; the number distinguishes steps with equal deadlines.
    steps: BTreeMap<Reverse<(Instant, u64)>, Arc<StepMaskCollector>>,
    count: u64,
    sessions: Vec<Weak<MaskSession>>,
}

impl MaskTimer {
    fn run(mut self, events: &Receiver<MaskTimerEvent>, timings: &GrammarTimings) {
        let mut checked_at = Instant::now();
        loop {
            match events.recv_timeout(self.time_to_next_event()) {
                Ok(MaskTimerEvent::Begin(session)) => self.sessions.push(session),
                Ok(MaskTimerEvent::Step(deadline, step)) => {
                    self.count += 1;
                    self.steps.insert(Reverse((deadline, self.count)), step);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let now = Instant::now();
            self.expire_steps(now, timings);
            if now.saturating_duration_since(checked_at) >= OVERDUE_CHECK_INTERVAL {
                checked_at = now;
                self.cancel_overdue_masks(now);
            }
        }
    }

    fn time_to_next_event(&self) -> Duration {
        let idle = if self.sessions.is_empty() { MASK_TIME } else { OVERDUE_CHECK_INTERVAL };
        let first = self.steps.last_key_value().map(|(Reverse((deadline, _)), _)| *deadline);
        first.map_or(idle, |deadline| deadline.saturating_duration_since(Instant::now()).min(idle))
    }

    fn expire_steps(&mut self, now: Instant, timings: &GrammarTimings) {
        while let Some(first) = self.steps.last_entry() {
            let Reverse((deadline, _)) = *first.key();
            if deadline > now {
                return;
            }
            first.remove().send_without_overdue(&timings.masks_overdue);
        }
    }

    fn cancel_overdue_masks(&mut self, now: Instant) {
        self.sessions.retain(|session| match session.upgrade() {
            Some(session) => {
                session.cancel_if_overdue(now);
                true
            }
            None => false,
        });
    }
}
