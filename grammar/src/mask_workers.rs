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
use super::mask_session::{MaskCommand, MaskEvent, MaskEventListener, MaskSession};
use super::step_mask_collector::StepMaskCollector;
use super::timings::GrammarTimings;
use super::yield_to_others;
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
/// Number of cores per thread of fast masks: masks must not take the cores of the forward pass.
const CORES_PER_THREAD: usize = 4;
/// Minimum and maximum number of threads for requests with slow masks. On machines with few cores there is
/// one, so that the step path keeps its core.
const SLOW_THREADS: std::ops::RangeInclusive<usize> = 1..=2;
/// Number of tokens that are passed to a session at a time before its first masked token, so that a request
/// costs nothing before its masks start.
const TOKENS_BUFFERED_MAX: usize = 64;
/// Interval of the check for overdue masks.
const OVERDUE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Handle of the engine thread to the mask workers.
pub struct MaskWorkers {
    live: HashMap<RequestId, LiveMaskSession>,
    pool: Arc<MaskWorkerPool>,
    timer: Sender<MaskTimerEvent>,
}

struct LiveMaskSession {
    session: Arc<MaskSession>,
    /// Number of output tokens so far.
    outputs: u32,
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
    /// A request started.
    Begin(Weak<MaskSession>),
    /// A step waits for its masks until a deadline.
    Step(Instant, Arc<StepMaskCollector>),
}

impl MaskWorkers {
    /// Starts the threads. `announce` is called for masks that a step did not wait for, when they are ready,
    /// and for requests that need no more masks.
    ///
    /// Errors: a thread cannot be started.
    pub fn start(
        timings: &Arc<GrammarTimings>,
        announce: impl Fn(RequestId, MaskEvent) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let pool = Arc::new(MaskWorkerPool {
            fast: MaskSessionQueue::default(),
            slow: MaskSessionQueue::default(),
            timings: Arc::clone(timings),
            listener: Arc::new(announce),
        });
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let share = cores / CORES_PER_THREAD;
        let [quick, slow] =
            [FAST_THREADS, SLOW_THREADS].map(|range| share.clamp(*range.start(), *range.end()));
        for slow in (0..quick + slow).map(|i| i >= quick) {
            let pool = Arc::clone(&pool);
            thread::Builder::new()
                .name(if slow { "grammar-slow" } else { "grammar-masks" }.to_owned())
                .stack_size(MASK_STACK_BYTES)
                .spawn(move || {
                    if slow {
                        yield_to_others();
                    }
                    pool.run_worker(if slow { &pool.slow } else { &pool.fast });
                })?;
        }
        let (clock, ticks) = channel();
        let timings = Arc::clone(timings);
        let run = move || MaskTimer::default().run(&ticks, &timings);
        thread::Builder::new().name("grammar-clock".to_owned()).spawn(run)?;
        Ok(Self { live: HashMap::new(), pool, timer: clock })
    }

    /// Registers a request whose output follows `guide`. Call it before the request is submitted.
    pub fn begin(&mut self, request: RequestId, guide: DecodingGuide) {
        let masked_from = guide.first_masked_token().unwrap_or(u32::MAX);
        let seat = Arc::new(MaskSession::new(request, guide));
        self.notify_timer(MaskTimerEvent::Begin(Arc::downgrade(&seat)));
        self.live.insert(
            request,
            LiveMaskSession {
                session: seat,
                outputs: 0,
                first_masked_token: masked_from,
                buffered: Vec::new(),
            },
        );
    }

    /// Passes the tokens that a tick committed to the sessions. Call it before a batch of the tick is sent:
    /// the masks of the batch depend on these tokens.
    pub fn observe_effects(&mut self, effects: &[SchedulerEffect]) {
        if self.live.is_empty() {
            return;
        }
        for effect in effects {
            if let SchedulerEffect::TokenEvents(news) = effect {
                for event in news {
                    self.observe_event(event);
                }
            }
        }
    }

    fn observe_event(&mut self, event: &TokenEvent) {
        if event.finish_reason.is_some() {
            if let Some(LiveMaskSession { session: seat, .. }) = self.live.remove(&event.request)
                && seat.end()
            {
                self.pool.slow.add(seat);
            }
        } else if let Some(live) = self.live.get_mut(&event.request)
            && !event.tokens.is_empty()
        {
            live.outputs += event.tokens.len() as u32;
            if live.session.is_done() {
                return;
            }
            live.buffered.extend_from_slice(&event.tokens);
            if live.outputs >= live.first_masked_token || live.buffered.len() >= TOKENS_BUFFERED_MAX
            {
                let tokens = live.buffered.as_slice().into();
                live.buffered.clear();
                self.pool.enqueue(&live.session, MaskCommand::Tokens(tokens));
            }
        }
    }

    /// Returns the masked rows of a batch.
    pub fn masked_rows(&self, batch: &Batch) -> Vec<(u32, RequestId)> {
        if self.live.is_empty() {
            return Vec::new();
        }
        let rows = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        rows.map(|(index, row)| (index, row.request)).collect()
    }

    /// Requests the masks of a batch that was just sent to `executor` and is expected to take `expected`.
    pub fn request_masks(
        &self,
        step: StepId,
        rows: Vec<(u32, RequestId)>,
        executor: &SyncSender<ExecutorCommand>,
        expected: Duration,
    ) {
        let due = Instant::now() + expected + mask_grace_period(expected);
        let waiting = rows.iter().map(|(row, _)| *row).collect();
        let step = Arc::new(StepMaskCollector::new(step, executor.clone(), waiting));
        for (row, request) in rows {
            let live = self.live.get(&request);
            let made = live.map_or(Some(Vec::new()), |live| live.session.ready_mask(live.outputs));
            match (made, live) {
                (None, Some(live)) => {
                    self.pool.enqueue(&live.session, MaskCommand::Compute(Arc::clone(&step), row));
                }
                // A request without a session is allowed no token.
                (made, _) => drop(step.put(row, made.unwrap_or_default())),
            }
        }
        if !step.is_complete() {
            self.notify_timer(MaskTimerEvent::Step(due, step));
        }
    }

    fn notify_timer(&self, tick: MaskTimerEvent) {
        let _ = self.timer.send(tick); // The timer thread ends when this sender is dropped.
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
    fn enqueue(&self, seat: &Arc<MaskSession>, order: MaskCommand) {
        if seat.enqueue(order) {
            self.queue_for(seat).add(Arc::clone(seat));
        }
    }

    fn queue_for(&self, seat: &MaskSession) -> &MaskSessionQueue {
        if seat.is_slow() { &self.slow } else { &self.fast }
    }

    /// Runs the sessions of a queue until it is closed.
    fn run_worker(&self, lane: &MaskSessionQueue) {
        while let Some(seat) = lane.next() {
            if seat.run_commands(&self.timings, &self.listener) {
                self.queue_for(&seat).add(seat);
            }
        }
    }
}

impl MaskSessionQueue {
    fn add(&self, seat: Arc<MaskSession>) {
        lock(&self.queue).sessions.push_back(seat);
        self.added.notify_one();
    }

    /// Waits for a session and returns it; `None` = the queue is closed.
    fn next(&self) -> Option<Arc<MaskSession>> {
        let queue = lock(&self.queue);
        let waits = |queue: &mut MaskSessionQueueState| queue.sessions.is_empty() && !queue.closed;
        let waited = self.added.wait_while(queue, waits);
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
    fn run(mut self, ticks: &Receiver<MaskTimerEvent>, timings: &GrammarTimings) {
        let mut watched_at = Instant::now();
        loop {
            match ticks.recv_timeout(self.time_to_next_event()) {
                Ok(MaskTimerEvent::Begin(seat)) => self.sessions.push(seat),
                Ok(MaskTimerEvent::Step(due, step)) => {
                    self.count += 1;
                    self.steps.insert(Reverse((due, self.count)), step);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let now = Instant::now();
            self.expire_steps(now, timings);
            if now.saturating_duration_since(watched_at) >= OVERDUE_CHECK_INTERVAL {
                watched_at = now;
                self.cancel_overdue_masks(now);
            }
        }
    }

    fn time_to_next_event(&self) -> Duration {
        let idle = if self.sessions.is_empty() { MASK_TIME } else { OVERDUE_CHECK_INTERVAL };
        let first = self.steps.last_key_value().map(|(Reverse((due, _)), _)| *due);
        first.map_or(idle, |due| due.saturating_duration_since(Instant::now()).min(idle))
    }

    fn expire_steps(&mut self, now: Instant, timings: &GrammarTimings) {
        while let Some(first) = self.steps.last_entry() {
            let Reverse((due, _)) = *first.key();
            if due > now {
                return;
            }
            first.remove().send_without_overdue(&timings.masks_overdue);
        }
    }

    fn cancel_overdue_masks(&mut self, now: Instant) {
        self.sessions.retain(|seat| match seat.upgrade() {
            Some(seat) => {
                seat.cancel_if_overdue(now);
                true
            }
            None => false,
        });
    }
}
