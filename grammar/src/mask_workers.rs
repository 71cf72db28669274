//! The threads that make the masks of live requests while the device works, and how one slow request is kept from
//! holding up the others.
//!
//! - A step waits for its masks only as long as it would have computed anyway, and a 20th more. Then its late rows
//!   go without a sample, and are planned again when their masks are there (`SchedulerEvent::MaskReady`).
//! - Requests whose masks are slow are served by threads of their own, with less of the processor. What one request
//!   finds out about its grammar holds for the next ones. They also drop what ended requests followed: never the thread
//!   that plans steps.
//! - A mask that takes far too long is given up; a request that spends too much on its masks gets no more. Both end
//!   with a mask that allows nothing, which ends that request and no other.

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

/// Threads of the quick requests at least, and at most.
const FAST_THREADS: std::ops::RangeInclusive<usize> = 2..=8;
/// Cores for each of them: masks must not take those of the forward pass.
const CORES_PER_THREAD: usize = 4;
/// Threads of the slow ones at least, and at most: with few cores the step path keeps one.
const SLOW_THREADS: std::ops::RangeInclusive<usize> = 1..=2;
/// Tokens of a request that no mask limits yet, handed on at a time: masks cost it nothing before they begin.
const TOKENS_BUFFERED_MAX: usize = 64;
/// How often masks under way are looked at.
const OVERDUE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The engine thread's end.
pub struct MaskWorkers {
    live: HashMap<RequestId, LiveMaskSession>,
    pool: Arc<MaskWorkerPool>,
    timer: Sender<MaskTimerEvent>,
}

struct LiveMaskSession {
    session: Arc<MaskSession>,
    /// Tokens of output so far, and in front of the first that a mask may limit.
    outputs: u32,
    first_masked_token: u32,
    /// The newest of them, not handed on yet.
    buffered: Vec<Token>,
}

struct MaskWorkerPool {
    fast: MaskSessionQueue,
    slow: MaskSessionQueue,
    timings: Arc<GrammarTimings>,
    listener: MaskEventListener,
}

/// Seats that wait for a thread.
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

/// What the clock hears.
enum MaskTimerEvent {
    /// A request lives.
    Begin(Weak<MaskSession>),
    /// A step waits until then.
    Step(Instant, Arc<StepMaskCollector>),
}

impl MaskWorkers {
    /// Starts the threads. `announce` hears of masks that steps have not waited for, once they are there, and of
    /// requests that need none any more.
    ///
    /// Errors: the system gives no thread.
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

    /// A request whose output follows `guide` is about to be submitted.
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

    /// Passes on what a tick committed. Call it before any batch of the same tick is sent: its masks build on it.
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

    /// The masked rows of a batch.
    pub fn masked_rows(&self, batch: &Batch) -> Vec<(u32, RequestId)> {
        if self.live.is_empty() {
            return Vec::new();
        }
        let rows = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        rows.map(|(index, row)| (index, row.request)).collect()
    }

    /// Has the masks of a batch made that has just been sent to `executor`, which is expected to answer after
    /// `expected`.
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
                // A request that nobody follows is allowed nothing.
                (made, _) => drop(step.put(row, made.unwrap_or_default())),
            }
        }
        if !step.is_complete() {
            self.notify_timer(MaskTimerEvent::Step(due, step));
        }
    }

    fn notify_timer(&self, tick: MaskTimerEvent) {
        let _ = self.timer.send(tick); // The clock ends with this end of its channel.
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

    /// Serves the seats of a lane until it is closed.
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

    /// Waits for a seat; `None` = the lane is closed.
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

/// Ends the patience of steps, and that with masks.
#[derive(Default)]
struct MaskTimer {
    /// By the time until which they wait; the number tells equal ones apart.
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
