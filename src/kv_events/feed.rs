//! The scheduler's end: hands over what changed and never waits.

use super::arrears::Arrears;
use super::figures::{Figures, count};
use protocol::{ExtraKey, KvEvent};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

/// What changed, and when in seconds of unix time.
#[derive(Debug)]
pub enum Changes {
    /// In one step, in order.
    Step(f64, Vec<KvEvent>),
    /// In all steps that found the queue full.
    Missed(f64, Box<Arrears>),
}

impl Changes {
    fn are_owed(&self) -> bool {
        matches!(self, Self::Missed(..))
    }

    /// Memory that they take while they wait.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Step(_, events) => events.iter().map(event_bytes).sum(),
            Self::Missed(_, arrears) => arrears.bytes(),
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
pub struct Room {
    /// Changes, at least 1.
    pub batches: usize,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The way from a scheduler to one publisher.
#[derive(Debug)]
pub struct Feed {
    queue: SyncSender<Changes>,
    room: Room,
    bell: Bell,
    figures: Arc<Figures>,
    gathered: Vec<KvEvent>,
    /// What was dropped and is still owed; what follows means nothing before it.
    arrears: Option<Box<Arrears>>,
    /// Size of the pool.
    blocks: u32,
    /// Tells the publisher's owner that this end is still there.
    alive: Arc<()>,
}

/// Wakes the publisher's thread, if it sleeps.
#[derive(Debug)]
pub struct Bell {
    wire: UnixStream,
    sleeping: Arc<AtomicBool>,
}

impl Bell {
    /// A bell that writes to `wire`, which must not block, while `sleeping` is set.
    pub fn new(wire: UnixStream, sleeping: Arc<AtomicBool>) -> Self {
        Self { wire, sleeping }
    }

    fn ring(&self) {
        // A full wire has woken it already, a closed one has nobody to wake.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            let _ = (&self.wire).write(&[1]);
        }
    }
}

impl Feed {
    /// A feed of a pool of `blocks`, and the end that its publisher reads; no more waits than there is `room` for.
    pub fn new(
        room: Room,
        blocks: u32,
        bell: Bell,
        figures: Arc<Figures>,
    ) -> (Self, Receiver<Changes>) {
        let (queue, changes) = sync_channel(room.batches);
        let feed = Self {
            queue,
            room,
            bell,
            figures,
            gathered: Vec::new(),
            arrears: None,
            blocks,
            alive: Arc::default(),
        };
        (feed, changes)
    }

    /// Is there for as long as the feed is.
    pub(super) fn alive(&self) -> Weak<()> {
        Arc::downgrade(&self.alive)
    }

    /// Adds to what this step changed.
    pub fn gather(&mut self, events: Vec<KvEvent>) {
        if self.gathered.is_empty() {
            self.gathered = events;
        } else {
            self.gathered.extend(events);
        }
    }

    /// Ends a step: hands over what was gathered as one batch, or notes it as owed if there is no room. Then
    /// nothing is handed over until half of the queue is free, and all that is owed is handed over at once.
    pub fn flush(&mut self) {
        if self.arrears.is_some() {
            self.owe();
            let Room { batches, bytes } = self.room;
            let waiting = self.figures.queue_depth.load(Ordering::Relaxed);
            if waiting > batches as u64 / 2 || self.waiting_bytes() > bytes / 2 {
                return;
            }
        }
        let changes = match self.arrears.take() {
            Some(arrears) => Changes::Missed(unix_seconds(), arrears),
            None if self.gathered.is_empty() => return,
            None => Changes::Step(unix_seconds(), std::mem::take(&mut self.gathered)),
        };
        let (bytes, waiting) = (changes.bytes(), self.waiting_bytes());
        // What is owed takes no less by waiting.
        let fits = waiting == 0 || waiting + bytes <= self.room.bytes || changes.are_owed();
        let sent = if fits { self.send(changes, bytes) } else { Err(TrySendError::Full(changes)) };
        match sent {
            Ok(()) => self.bell.ring(),
            Err(TrySendError::Full(Changes::Step(_, events))) => {
                self.gathered = events;
                self.owe();
            }
            Err(TrySendError::Full(Changes::Missed(_, arrears))) => self.arrears = Some(arrears),
            // The publisher's thread is gone, and has said why.
            Err(TrySendError::Disconnected(_)) => count(&self.figures.dropped, 1),
        }
    }

    /// Hands over changes of so many bytes.
    fn send(&self, changes: Changes, bytes: u64) -> Result<(), TrySendError<Changes>> {
        count(&self.figures.queue_depth, 1);
        count(&self.figures.queue_bytes, bytes);
        let sent = self.queue.try_send(changes);
        if sent.is_err() {
            self.figures.queue_depth.fetch_sub(1, Ordering::Relaxed);
            self.figures.queue_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        sent
    }

    fn waiting_bytes(&self) -> u64 {
        self.figures.queue_bytes.load(Ordering::Relaxed)
    }

    /// Drops a batch, and keeps what it means for the blocks.
    fn owe(&mut self) {
        let blocks = self.blocks;
        let arrears = self.arrears.get_or_insert_with(|| Box::new(Arrears::new(blocks)));
        if !self.gathered.is_empty() {
            for event in self.gathered.drain(..) {
                arrears.add(&event);
            }
            count(&self.figures.dropped, 1);
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        // The other end sees that the queue is closed only when it looks.
        let (closed, _) = sync_channel(1);
        self.queue = closed;
        self.bell.ring();
    }
}

/// Now.
pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
