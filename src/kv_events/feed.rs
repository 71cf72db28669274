//! The scheduler's end: hands over what changed and never waits.

use super::arrears::Arrears;
use super::figures::{Figures, count};
use protocol::KvEvent;
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

/// The way from a scheduler to one publisher.
#[derive(Debug)]
pub struct Feed {
    queue: SyncSender<Changes>,
    queue_len_max: u64,
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
    /// A feed of a pool of `blocks`, and the end that its publisher reads; at most `queue_len_max` changes wait.
    pub fn new(
        queue_len_max: usize,
        blocks: u32,
        bell: Bell,
        figures: Arc<Figures>,
    ) -> (Self, Receiver<Changes>) {
        let (queue, changes) = sync_channel(queue_len_max);
        let feed = Self {
            queue,
            queue_len_max: queue_len_max as u64,
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
            let waiting = self.figures.queue_depth.load(Ordering::Relaxed);
            if waiting > self.queue_len_max / 2 {
                return;
            }
        }
        let changes = match self.arrears.take() {
            Some(arrears) => Changes::Missed(unix_seconds(), arrears),
            None if self.gathered.is_empty() => return,
            None => Changes::Step(unix_seconds(), std::mem::take(&mut self.gathered)),
        };
        count(&self.figures.queue_depth, 1);
        let Err(error) = self.queue.try_send(changes) else { return self.bell.ring() };
        self.figures.queue_depth.fetch_sub(1, Ordering::Relaxed);
        match error {
            TrySendError::Full(Changes::Step(_, events)) => {
                self.gathered = events;
                self.owe();
            }
            TrySendError::Full(Changes::Missed(_, arrears)) => self.arrears = Some(arrears),
            // The publisher's thread is gone, and has said why.
            TrySendError::Disconnected(_) => count(&self.figures.dropped, 1),
        }
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
