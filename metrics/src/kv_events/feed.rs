//! Scheduler side of KV-event publishing: passes events to the publisher thread without blocking.

use super::backlog::EventBacklog;
use super::publisher_counters::{PublisherCounters, count};
use protocol::{ExtraKey, KvEvent};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

/// Entry of a publisher's queue: events, with their time in seconds of Unix time.
#[derive(Debug)]
pub enum QueuedKvEvents {
    /// Events of one step, in order.
    Step(f64, Vec<KvEvent>),
    /// Coalesced events of all steps for which the queue was full.
    Backlog(f64, Box<EventBacklog>),
}

impl QueuedKvEvents {
    fn is_backlog(&self) -> bool {
        matches!(self, Self::Backlog(..))
    }

    /// Memory usage of the queue entry, in bytes; counted for the byte limit of the queue.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Step(_, events) => events.iter().map(event_bytes).sum(),
            Self::Backlog(_, backlog) => backlog.bytes(),
        }
    }
}

fn event_bytes(event: &KvEvent) -> u64 {
    let heap_bytes = match event {
        KvEvent::Cleared => 0,
        KvEvent::Removed { hashes, .. } => size_of_val(&hashes[..]),
        KvEvent::Stored { hashes, tokens, extra_keys, .. } => {
            let keys = extra_keys.iter().flatten().map(|key| {
                let (ExtraKey::Lora(text) | ExtraKey::Salt(text)) = key;
                size_of::<ExtraKey>() + text.len()
            });
            let fixed = size_of_val(&hashes[..]) + size_of_val(&extra_keys[..]);
            fixed + size_of_val(&tokens[..]) + keys.sum::<usize>()
        }
    };
    (size_of::<KvEvent>() + heap_bytes) as u64
}

/// Limits of the queue from the scheduler thread to a publisher. A single entry is accepted whatever its
/// size.
#[derive(Debug, Clone, Copy)]
pub struct FeedLimits {
    /// Maximum number of entries, at least 1.
    pub batches: usize,
    /// Maximum number of bytes of all entries.
    pub bytes: u64,
}

/// Feed of KV events from a scheduler to one publisher.
#[derive(Debug)]
pub struct KvEventFeed {
    queue: SyncSender<QueuedKvEvents>,
    limits: FeedLimits,
    waker: PublisherWaker,
    counters: Arc<PublisherCounters>,
    pending: Vec<KvEvent>,
    /// Events that were dropped because the queue was full. The publisher must receive them before later
    /// events, which depend on them. `None` = the queue has all events.
    backlog: Option<Box<EventBacklog>>,
    /// Number of blocks of the KV pool, for which a new backlog reserves space.
    blocks: u32,
    /// Strong reference by which the handle of the publisher detects whether the feed exists.
    liveness: Arc<()>,
}

/// Wakes the publisher thread if it sleeps, by writing a byte to a socket that the thread polls.
#[derive(Debug)]
pub struct PublisherWaker {
    socket: UnixStream,
    sleeping: Arc<AtomicBool>,
}

impl PublisherWaker {
    /// Creates a waker that writes to `socket`, which must be non-blocking, while `sleeping` is set.
    pub fn new(socket: UnixStream, sleeping: Arc<AtomicBool>) -> Self {
        Self { socket, sleeping }
    }

    fn wake(&self) {
        // If the socket is full, the thread has been woken already; if it is closed, there is no thread to
        // wake.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            let _ = (&self.socket).write(&[1]);
        }
    }
}

impl KvEventFeed {
    /// Creates a feed for a KV pool of `blocks` blocks with a queue limited by `limits`, and the receiving
    /// end of the queue for the publisher.
    pub fn new(
        limits: FeedLimits,
        blocks: u32,
        waker: PublisherWaker,
        counters: Arc<PublisherCounters>,
    ) -> (Self, Receiver<QueuedKvEvents>) {
        let (queue, changes) = sync_channel(limits.batches);
        let feed = Self {
            queue,
            limits,
            waker,
            counters,
            pending: Vec::new(),
            backlog: None,
            blocks,
            liveness: Arc::default(),
        };
        (feed, changes)
    }

    /// Returns a weak reference that can be upgraded while the feed exists.
    pub(super) fn liveness(&self) -> Weak<()> {
        Arc::downgrade(&self.liveness)
    }

    /// Adds events of the current step, which `flush` queues at the end of the step.
    pub fn add(&mut self, events: Vec<KvEvent>) {
        if self.pending.is_empty() {
            self.pending = events;
        } else {
            self.pending.extend(events);
        }
    }

    /// Ends a step: queues its events as one batch, or adds them to the backlog if the queue is full. While
    /// there is a backlog, nothing is queued until half of the queue is free; then the whole backlog is
    /// queued as one entry.
    pub fn flush(&mut self) {
        if self.backlog.is_some() {
            self.add_to_backlog();
            if self.is_more_than_half_full() {
                return;
            }
        }
        let changes = match self.backlog.take() {
            Some(backlog) => QueuedKvEvents::Backlog(unix_seconds(), backlog),
            None if self.pending.is_empty() => return,
            None => QueuedKvEvents::Step(unix_seconds(), std::mem::take(&mut self.pending)),
        };
        let (bytes, queued) = (changes.bytes(), self.queued_bytes());
        // A backlog is queued regardless of its size, because a backlog does not become smaller by waiting.
        let fits = queued == 0 || queued + bytes <= self.limits.bytes || changes.is_backlog();
        let sent = if fits { self.send(changes, bytes) } else { Err(TrySendError::Full(changes)) };
        match sent {
            Ok(()) => self.waker.wake(),
            Err(TrySendError::Full(QueuedKvEvents::Step(_, events))) => {
                self.pending = events;
                self.add_to_backlog();
            }
            Err(TrySendError::Full(QueuedKvEvents::Backlog(_, backlog))) => {
                self.backlog = Some(backlog);
            }
            // The publisher thread has ended and has reported the reason: count the events as dropped.
            Err(TrySendError::Disconnected(_)) => count(&self.counters.dropped, 1),
        }
    }

    /// Queues changes for the publisher thread and adds them to the queue gauges. `bytes`: memory usage of
    /// the changes.
    fn send(
        &self,
        changes: QueuedKvEvents,
        bytes: u64,
    ) -> Result<(), TrySendError<QueuedKvEvents>> {
        count(&self.counters.queue_depth, 1);
        count(&self.counters.queue_bytes, bytes);
        let sent = self.queue.try_send(changes);
        if sent.is_err() {
            self.counters.queue_depth.fetch_sub(1, Ordering::Relaxed);
            self.counters.queue_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        sent
    }

    /// Whether less than half of the queue is free.
    fn is_more_than_half_full(&self) -> bool {
        let FeedLimits { batches, bytes } = self.limits;
        let queued = self.counters.queue_depth.load(Ordering::Relaxed);
        queued > batches as u64 / 2 || self.queued_bytes() > bytes / 2
    }

    fn queued_bytes(&self) -> u64 {
        self.counters.queue_bytes.load(Ordering::Relaxed)
    }

    /// Adds the events of this step to the backlog, and counts their batch as dropped.
    fn add_to_backlog(&mut self) {
        let blocks = self.blocks;
        let backlog = self.backlog.get_or_insert_with(|| Box::new(EventBacklog::new(blocks)));
        if !self.pending.is_empty() {
            for event in self.pending.drain(..) {
                backlog.add(&event);
            }
            count(&self.counters.dropped, 1);
        }
    }
}

impl Drop for KvEventFeed {
    fn drop(&mut self) {
        // Close the queue before waking the publisher thread, which detects a closed queue only when it
        // wakes.
        let (closed, _) = sync_channel(1);
        self.queue = closed;
        self.waker.wake();
    }
}

/// Returns the current time in seconds of Unix time.
pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
