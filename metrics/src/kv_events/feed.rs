//! The scheduler's end: hands over what changed and never waits.

use super::backlog::EventBacklog;
use super::publisher_counters::{PublisherCounters, count};
use protocol::{ExtraKey, KvEvent};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

/// What changed, and when in seconds of unix time.
#[derive(Debug)]
pub enum KvEventChanges {
    /// In one step, in order.
    Step(f64, Vec<KvEvent>),
    /// In all steps that found the queue full.
    Backlog(f64, Box<EventBacklog>),
}

impl KvEventChanges {
    fn is_backlog(&self) -> bool {
        matches!(self, Self::Backlog(..))
    }

    /// Memory that they take while they wait.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Step(_, events) => events.iter().map(event_bytes).sum(),
            Self::Backlog(_, arrears) => arrears.bytes(),
        }
    }
}

fn event_bytes(event: &KvEvent) -> u64 {
    let lists = match event {
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
    (size_of::<KvEvent>() + lists) as u64
}

/// How much may wait for a publisher. A single change may always, whatever its size.
#[derive(Debug, Clone, Copy)]
pub struct FeedLimits {
    /// Changes, at least 1.
    pub batches: usize,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The way from a scheduler to one publisher.
#[derive(Debug)]
pub struct KvEventFeed {
    queue: SyncSender<KvEventChanges>,
    limits: FeedLimits,
    waker: PublisherWaker,
    counters: Arc<PublisherCounters>,
    pending: Vec<KvEvent>,
    /// What was dropped and is still owed; what follows means nothing before it.
    backlog: Option<Box<EventBacklog>>,
    /// Size of the pool.
    blocks: u32,
    /// Tells the publisher's owner that this end is still there.
    liveness: Arc<()>,
}

/// Wakes the publisher's thread, if it sleeps.
#[derive(Debug)]
pub struct PublisherWaker {
    socket: UnixStream,
    sleeping: Arc<AtomicBool>,
}

impl PublisherWaker {
    /// A bell that writes to `wire`, which must not block, while `sleeping` is set.
    pub fn new(wire: UnixStream, sleeping: Arc<AtomicBool>) -> Self {
        Self { socket: wire, sleeping }
    }

    fn wake(&self) {
        // A full wire has woken it already, a closed one has nobody to wake.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            let _ = (&self.socket).write(&[1]);
        }
    }
}

impl KvEventFeed {
    /// A feed of a pool of `blocks`, and the end that its publisher reads; no more waits than there is `room` for.
    pub fn new(
        room: FeedLimits,
        blocks: u32,
        bell: PublisherWaker,
        figures: Arc<PublisherCounters>,
    ) -> (Self, Receiver<KvEventChanges>) {
        let (queue, changes) = sync_channel(room.batches);
        let feed = Self {
            queue,
            limits: room,
            waker: bell,
            counters: figures,
            pending: Vec::new(),
            backlog: None,
            blocks,
            liveness: Arc::default(),
        };
        (feed, changes)
    }

    /// Is there for as long as the feed is.
    pub(super) fn liveness(&self) -> Weak<()> {
        Arc::downgrade(&self.liveness)
    }

    /// Adds to what this step changed.
    pub fn add(&mut self, events: Vec<KvEvent>) {
        if self.pending.is_empty() {
            self.pending = events;
        } else {
            self.pending.extend(events);
        }
    }

    /// Ends a step: hands over what was gathered as one batch, or notes it as owed if there is no room. Then
    /// nothing is handed over until half of the queue is free, and all that is owed is handed over at once.
    pub fn flush(&mut self) {
        if self.backlog.is_some() {
            self.add_to_backlog();
            let FeedLimits { batches, bytes } = self.limits;
            let waiting = self.counters.queue_depth.load(Ordering::Relaxed);
            if waiting > batches as u64 / 2 || self.waiting_bytes() > bytes / 2 {
                return;
            }
        }
        let changes = match self.backlog.take() {
            Some(arrears) => KvEventChanges::Backlog(unix_seconds(), arrears),
            None if self.pending.is_empty() => return,
            None => KvEventChanges::Step(unix_seconds(), std::mem::take(&mut self.pending)),
        };
        let (bytes, waiting) = (changes.bytes(), self.waiting_bytes());
        // What is owed takes no less by waiting.
        let fits = waiting == 0 || waiting + bytes <= self.limits.bytes || changes.is_backlog();
        let sent = if fits { self.send(changes, bytes) } else { Err(TrySendError::Full(changes)) };
        match sent {
            Ok(()) => self.waker.wake(),
            Err(TrySendError::Full(KvEventChanges::Step(_, events))) => {
                self.pending = events;
                self.add_to_backlog();
            }
            Err(TrySendError::Full(KvEventChanges::Backlog(_, arrears))) => {
                self.backlog = Some(arrears);
            }
            // The publisher's thread is gone, and has said why.
            Err(TrySendError::Disconnected(_)) => count(&self.counters.dropped, 1),
        }
    }

    /// Hands over changes of so many bytes.
    fn send(
        &self,
        changes: KvEventChanges,
        bytes: u64,
    ) -> Result<(), TrySendError<KvEventChanges>> {
        count(&self.counters.queue_depth, 1);
        count(&self.counters.queue_bytes, bytes);
        let sent = self.queue.try_send(changes);
        if sent.is_err() {
            self.counters.queue_depth.fetch_sub(1, Ordering::Relaxed);
            self.counters.queue_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        sent
    }

    fn waiting_bytes(&self) -> u64 {
        self.counters.queue_bytes.load(Ordering::Relaxed)
    }

    /// Drops a batch, and keeps what it means for the blocks.
    fn add_to_backlog(&mut self) {
        let blocks = self.blocks;
        let arrears = self.backlog.get_or_insert_with(|| Box::new(EventBacklog::new(blocks)));
        if !self.pending.is_empty() {
            for event in self.pending.drain(..) {
                arrears.add(&event);
            }
            count(&self.counters.dropped, 1);
        }
    }
}

impl Drop for KvEventFeed {
    fn drop(&mut self) {
        // The other end sees that the queue is closed only when it looks.
        let (closed, _) = sync_channel(1);
        self.queue = closed;
        self.waker.wake();
    }
}

/// Now.
pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
