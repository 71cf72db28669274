//! The threads that make the masks of live requests while the device works, and how one slow request is kept from
//! holding up the others.
//!
//! - A step waits for its masks only as long as it would have computed anyway, and a 20th more. Then its late rows
//!   go without a sample, and are planned again when their masks are there (`Event::MaskMade`).
//! - Requests whose masks are slow are served by threads of their own, with less of the processor. What one request
//!   finds out about its grammar holds for the next ones. They also drop what ended requests followed: never the thread
//!   that plans steps.
//! - A mask that takes far too long is given up; a request that spends too much on its masks gets no more. Both end
//!   with a mask that allows nothing, which ends that request and no other.

#[cfg(all(test, feature = "interleavings"))]
mod interleavings;

use super::guide::Guide;
use super::limits::{MASK_STACK_BYTES, MASK_TIME, mask_grace};
use super::mask_seat::{Announce, News, Order, Seat};
use super::mask_step::StepMasks;
use super::timings::GrammarTimings;
use super::yield_to_others;
use crate::sync::{Condvar, Mutex, lock};
use protocol::{Batch, RequestId, StepId, ToExecutor, Token};
use scheduler::{Effect, TokenEvent};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel};
use std::sync::{Arc, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Threads of the quick requests at least, and at most.
const QUICK_THREADS: std::ops::RangeInclusive<usize> = 2..=8;
/// Cores for each of them: masks must not take those of the forward pass.
const CORES_PER_THREAD: usize = 4;
/// Threads of the slow ones at least, and at most: with few cores the step path keeps one.
const SLOW_THREADS: std::ops::RangeInclusive<usize> = 1..=2;
/// Tokens of a request that no mask limits yet, handed on at a time: masks cost it nothing before they begin.
const TOKENS_HELD: usize = 64;
/// How often masks under way are looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The engine thread's end.
pub struct MaskWorkers {
    live: HashMap<RequestId, Live>,
    pool: Arc<Pool>,
    clock: Sender<Tick>,
}

struct Live {
    seat: Arc<Seat>,
    /// Tokens of output so far, and in front of the first that a mask may limit.
    outputs: u32,
    masked_from: u32,
    /// The newest of them, not handed on yet.
    held: Vec<Token>,
}

struct Pool {
    quick: Lane,
    slow: Lane,
    timings: Arc<GrammarTimings>,
    announce: Announce,
}

/// Seats that wait for a thread.
#[derive(Default)]
struct Lane {
    queue: Mutex<Queue>,
    added: Condvar,
}

#[derive(Default)]
struct Queue {
    seats: VecDeque<Arc<Seat>>,
    closed: bool,
}

/// What the clock hears.
enum Tick {
    /// A request lives.
    Begin(Weak<Seat>),
    /// A step waits until then.
    Step(Instant, Arc<StepMasks>),
}

impl MaskWorkers {
    /// Starts the threads. `announce` hears of masks that steps have not waited for, once they are there, and of
    /// requests that need none any more.
    ///
    /// Errors: the system gives no thread.
    pub fn start(
        timings: &Arc<GrammarTimings>,
        announce: impl Fn(RequestId, News) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let pool = Arc::new(Pool {
            quick: Lane::default(),
            slow: Lane::default(),
            timings: Arc::clone(timings),
            announce: Arc::new(announce),
        });
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let share = cores / CORES_PER_THREAD;
        let [quick, slow] =
            [QUICK_THREADS, SLOW_THREADS].map(|range| share.clamp(*range.start(), *range.end()));
        for slow in (0..quick + slow).map(|i| i >= quick) {
            let pool = Arc::clone(&pool);
            thread::Builder::new()
                .name(if slow { "grammar-slow" } else { "grammar-masks" }.to_owned())
                .stack_size(MASK_STACK_BYTES)
                .spawn(move || {
                    if slow {
                        yield_to_others();
                    }
                    pool.serve(if slow { &pool.slow } else { &pool.quick });
                })?;
        }
        let (clock, ticks) = channel();
        let timings = Arc::clone(timings);
        let run = move || Clock::default().run(&ticks, &timings);
        thread::Builder::new().name("grammar-clock".to_owned()).spawn(run)?;
        Ok(Self { live: HashMap::new(), pool, clock })
    }

    /// A request whose output follows `guide` is about to be submitted.
    pub fn begin(&mut self, request: RequestId, guide: Guide) {
        let masked_from = guide.masked_from().unwrap_or(u32::MAX);
        let seat = Arc::new(Seat::new(request, guide));
        self.tick(Tick::Begin(Arc::downgrade(&seat)));
        self.live.insert(request, Live { seat, outputs: 0, masked_from, held: Vec::new() });
    }

    /// Passes on what a tick committed. Call it before any batch of the same tick is sent: its masks build on it.
    pub fn hear(&mut self, effects: &[Effect]) {
        if self.live.is_empty() {
            return;
        }
        for effect in effects {
            if let Effect::Tokens(news) = effect {
                for event in news {
                    self.hear_one(event);
                }
            }
        }
    }

    fn hear_one(&mut self, event: &TokenEvent) {
        if event.finish.is_some() {
            if let Some(Live { seat, .. }) = self.live.remove(&event.request)
                && seat.end()
            {
                self.pool.slow.add(seat);
            }
        } else if let Some(live) = self.live.get_mut(&event.request)
            && !event.tokens.is_empty()
        {
            live.outputs += event.tokens.len() as u32;
            if live.seat.is_over() {
                return;
            }
            live.held.extend_from_slice(&event.tokens);
            if live.outputs >= live.masked_from || live.held.len() >= TOKENS_HELD {
                let tokens = live.held.as_slice().into();
                live.held.clear();
                self.pool.order(&live.seat, Order::Tokens(tokens));
            }
        }
    }

    /// The masked rows of a batch.
    pub fn rows_of(&self, batch: &Batch) -> Vec<(u32, RequestId)> {
        if self.live.is_empty() {
            return Vec::new();
        }
        let rows = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        rows.map(|(index, row)| (index, row.request)).collect()
    }

    /// Has the masks of a batch made that has just been sent to `executor`, which is expected to answer after
    /// `expected`.
    pub fn make(
        &self,
        step: StepId,
        rows: Vec<(u32, RequestId)>,
        executor: &SyncSender<ToExecutor>,
        expected: Duration,
    ) {
        let due = Instant::now() + expected + mask_grace(expected);
        let waiting = rows.iter().map(|(row, _)| *row).collect();
        let step = Arc::new(StepMasks::new(step, executor.clone(), waiting));
        for (row, request) in rows {
            let live = self.live.get(&request);
            let made = live.map_or(Some(Vec::new()), |live| live.seat.made(live.outputs));
            match (made, live) {
                (None, Some(live)) => {
                    self.pool.order(&live.seat, Order::Want(Arc::clone(&step), row));
                }
                // A request that nobody follows is allowed nothing.
                (made, _) => drop(step.put(row, made.unwrap_or_default())),
            }
        }
        if !step.is_whole() {
            self.tick(Tick::Step(due, step));
        }
    }

    fn tick(&self, tick: Tick) {
        let _ = self.clock.send(tick); // The clock ends with this end of its channel.
    }
}

impl Drop for MaskWorkers {
    fn drop(&mut self) {
        for live in self.live.values() {
            live.seat.end();
        }
        self.pool.quick.close();
        self.pool.slow.close();
    }
}

impl Pool {
    fn order(&self, seat: &Arc<Seat>, order: Order) {
        if seat.order(order) {
            self.lane_of(seat).add(Arc::clone(seat));
        }
    }

    fn lane_of(&self, seat: &Seat) -> &Lane {
        if seat.is_slow() { &self.slow } else { &self.quick }
    }

    /// Serves the seats of a lane until it is closed.
    fn serve(&self, lane: &Lane) {
        while let Some(seat) = lane.next() {
            if seat.serve(&self.timings, &self.announce) {
                self.lane_of(&seat).add(seat);
            }
        }
    }
}

impl Lane {
    fn add(&self, seat: Arc<Seat>) {
        lock(&self.queue).seats.push_back(seat);
        self.added.notify_one();
    }

    /// Waits for a seat; `None` = the lane is closed.
    fn next(&self) -> Option<Arc<Seat>> {
        let queue = lock(&self.queue);
        let waits = |queue: &mut Queue| queue.seats.is_empty() && !queue.closed;
        let waited = self.added.wait_while(queue, waits);
        waited.unwrap_or_else(PoisonError::into_inner).seats.pop_front()
    }

    fn close(&self) {
        let mut queue = lock(&self.queue);
        queue.seats.clear();
        queue.closed = true;
        self.added.notify_all();
    }
}

/// Ends the patience of steps, and that with masks.
#[derive(Default)]
struct Clock {
    /// By the time until which they wait; the number tells equal ones apart.
    steps: BTreeMap<Reverse<(Instant, u64)>, Arc<StepMasks>>,
    count: u64,
    seats: Vec<Weak<Seat>>,
}

impl Clock {
    fn run(mut self, ticks: &Receiver<Tick>, timings: &GrammarTimings) {
        let mut watched_at = Instant::now();
        loop {
            match ticks.recv_timeout(self.patience()) {
                Ok(Tick::Begin(seat)) => self.seats.push(seat),
                Ok(Tick::Step(due, step)) => {
                    self.count += 1;
                    self.steps.insert(Reverse((due, self.count)), step);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let now = Instant::now();
            self.expire(now, timings);
            if now.saturating_duration_since(watched_at) >= WATCH_INTERVAL {
                watched_at = now;
                self.watch(now);
            }
        }
    }

    fn patience(&self) -> Duration {
        let idle = if self.seats.is_empty() { MASK_TIME } else { WATCH_INTERVAL };
        let first = self.steps.last_key_value().map(|(Reverse((due, _)), _)| *due);
        first.map_or(idle, |due| due.saturating_duration_since(Instant::now()).min(idle))
    }

    fn expire(&mut self, now: Instant, timings: &GrammarTimings) {
        while let Some(first) = self.steps.last_entry() {
            let Reverse((due, _)) = *first.key();
            if due > now {
                return;
            }
            first.remove().expire(&timings.masks_late);
        }
    }

    fn watch(&mut self, now: Instant) {
        self.seats.retain(|seat| match seat.upgrade() {
            Some(seat) => {
                seat.check_time(now);
                true
            }
            None => false,
        });
    }
}
