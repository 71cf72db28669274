//! The publisher's thread: owns both sockets of one replica and sleeps until there is something to send.

use super::arrears::Arrears;
use super::encode::Encoder;
use super::endpoint::TopicWords;
use super::feed::{Bell, Changes, Feed, Room, unix_seconds};
use super::figures::{Figures, count};
use super::journal::{Entry, Journal};
use super::publish::PublishSocket;
use super::replay::{Library, ReplaySocket};
use super::sockets::{self, SocketError, Sockets};
use super::source::Source;
use crate::config::{KvEventsConfig, SequenceStart};
use protocol::{KvEvent, KvKind, KvSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Batches sent before replays get a turn.
const BATCHES_PER_TURN: usize = 1024;
/// At the end: time for what still waits.
const FLUSH: Duration = Duration::from_secs(1);
/// Longest sleep while a peer has a deadline or sends too fast.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Blocks of the primary tier, whatever the device is.
const PRIMARY_MEDIUM: &str = "GPU";

/// A publisher whose sockets are open, before the model is up.
pub struct Bound {
    config: KvEventsConfig,
    words: TopicWords,
    sockets: Sockets,
}

impl Bound {
    /// Opens the sockets of one rank; `words.epoch` is chosen here.
    ///
    /// Errors: an address in use, or none of this machine.
    pub fn open(config: &KvEventsConfig, mut words: TopicWords) -> Result<Self, SocketError> {
        words.epoch = match config.sequence_start {
            SequenceStart::Clock => (unix_seconds() * 1e6) as u64,
            SequenceStart::Zero => 0,
        };
        let sockets = sockets::open(config, &words)?;
        Ok(Self { config: config.clone(), words, sockets })
    }

    /// Starts to publish for a cache of this layout with a pool of `blocks`, and to count in `figures`.
    pub fn start(
        self,
        spec: &KvSpec,
        blocks: u32,
        figures: Arc<Figures>,
    ) -> io::Result<(Feed, Publisher)> {
        let Self { config, words, sockets } = self;
        let Sockets { publish, endpoint, binds, replay, topic } = sockets;
        let encoder = Encoder {
            format: config.format,
            rank: words.rank,
            block_tokens: spec.block_tokens,
            medium: PRIMARY_MEDIUM,
            kinds: spec.groups.iter().map(|group| kind_name(group.kind)).collect(),
            token_ids: config.token_ids,
        };
        let journal = Journal::new(encoder, words.epoch, config.buffer_steps);
        let (wire, woken) = UnixStream::pair()?;
        wire.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let sleeping = Arc::new(AtomicBool::new(false));
        let (replay, replay_endpoint) =
            replay.map(|bound| (bound.listener, bound.endpoint)).unzip();
        let publish = PublishSocket::new(&config, publish, &topic, &wire, Arc::clone(&figures))?;
        let source = Arc::new(Source {
            rank: words.rank,
            endpoint,
            binds,
            replay_endpoint,
            topic: topic.clone(),
            block_tokens: spec.block_tokens,
            figures,
            config,
        });
        source.figures.epoch.store(words.epoch, Ordering::Relaxed);
        let bell = Bell::new(wire, Arc::clone(&sleeping));
        let (feed, changes) =
            Feed::new(room(&source.config), blocks, bell, Arc::clone(&source.figures));
        let desk = Desk {
            journal,
            changes,
            publish,
            replay: replay.map(|listener| ReplaySocket::new(listener, &topic)),
            woken,
            sleeping,
            source: Arc::clone(&source),
            sent: Instant::now(),
        };
        let named = thread::Builder::new().name(format!("kv-events-{}", words.rank));
        let thread = named.spawn(move || desk.run())?;
        let publisher = Publisher { source, thread, feed: feed.alive() };
        Ok((feed, publisher))
    }
}

/// What may wait for the thread.
fn room(config: &KvEventsConfig) -> Room {
    Room { batches: config.max_queue_size, bytes: config.max_queue_bytes }
}

/// What a group stores, in vLLM's words.
fn kind_name(kind: KvKind) -> &'static str {
    match kind {
        KvKind::Full => "full_attention",
        KvKind::Latent => "mla_attention",
    }
}

/// A running publisher. It ends when its feed is dropped.
pub struct Publisher {
    source: Arc<Source>,
    thread: JoinHandle<()>,
    feed: Weak<()>,
}

impl Publisher {
    /// What it is, and its counters.
    pub fn source(&self) -> &Arc<Source> {
        &self.source
    }

    /// Waits a moment until everything handed over is sent; not at all if there may be more.
    pub fn finish(self) {
        if self.feed.strong_count() > 0 {
            return; // The server is told to end at once.
        }
        let deadline = Instant::now() + FLUSH;
        while !self.thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Everything the thread works with.
struct Desk {
    journal: Journal,
    changes: Receiver<Changes>,
    publish: PublishSocket,
    replay: Option<ReplaySocket>,
    woken: UnixStream,
    sleeping: Arc<AtomicBool>,
    source: Arc<Source>,
    /// When the last batch was sent.
    sent: Instant,
}

impl Desk {
    fn run(mut self) {
        self.append(unix_seconds(), &[KvEvent::Cleared]);
        loop {
            let Ok(mut more) = self.publish_waiting() else {
                return self.publish.flush(FLUSH);
            };
            let now = Instant::now();
            more |= self.publish.turn(now);
            if let Some(replay) = &mut self.replay {
                let (journal, figures) = (&mut self.journal, &*self.source.figures);
                more |= replay.turn(now, &mut Library { journal, figures, ts: unix_seconds() });
            }
            if !more {
                self.sleep();
            }
        }
    }

    /// Sends what waits; whether there is more.
    ///
    /// Errors: the feed is gone, and everything is sent.
    fn publish_waiting(&mut self) -> Result<bool, TryRecvError> {
        for _ in 0..BATCHES_PER_TURN {
            match self.changes.try_recv() {
                Ok(changes) => {
                    self.source.figures.taken(&changes);
                    match changes {
                        Changes::Step(ts, events) => self.append(ts, &events),
                        Changes::Missed(ts, arrears) => self.catch_up(ts, *arrears),
                    }
                }
                Err(TryRecvError::Empty) => return Ok(false),
                Err(gone @ TryRecvError::Disconnected) => return Err(gone),
            }
        }
        Ok(true)
    }

    /// Sends one step's events.
    fn append(&mut self, ts: f64, events: &[KvEvent]) {
        let entry = self.journal.append(ts, events);
        self.send(entry, events.len());
    }

    /// Sends everything that is cached, in place of steps that were missed.
    fn catch_up(&mut self, ts: f64, arrears: Arrears) {
        let entry = self.journal.catch_up(ts, arrears);
        self.send(entry, 1 + self.journal.blocks());
    }

    fn send(&mut self, entry: io::Result<Entry>, events: usize) {
        let figures = &self.source.figures;
        let Ok(entry) = entry else {
            count(&figures.errors, 1);
            return;
        };
        figures.seq.store(entry.seq, Ordering::Relaxed);
        count(&figures.batches, 1);
        count(&figures.events, events as u64);
        // A subscriber that reads too slowly misses batches, and sees it by the number.
        let now = Instant::now();
        self.publish.send(entry.seq, entry.payload, now);
        self.sent = now;
    }

    /// Sleeps until something was handed over or asked for, or a beat is due.
    fn sleep(&mut self) {
        self.sleeping.store(true, Ordering::SeqCst);
        // What was handed over before the line above has not rung, and is sent by the sockets' next turn.
        let sent = self.sent;
        if !matches!(self.publish_waiting(), Ok(false)) || self.sent != sent {
            self.sleeping.store(false, Ordering::SeqCst);
            return;
        }
        let beat = self.source.config.idle_beat();
        let mut left = beat.map(|beat| beat.saturating_sub(self.sent.elapsed()));
        let mut polled = vec![PollFd::new(&self.woken, PollFlags::IN)];
        let mut needs_time = self.publish.watch(&mut polled);
        needs_time |= self.replay.as_ref().is_some_and(|replay| replay.watch(&mut polled));
        if needs_time {
            left = Some(left.map_or(LOOK_INTERVAL, |left| left.min(LOOK_INTERVAL)));
        }
        // A day and more ends at once, and the sleep begins anew.
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        // An interrupted wait is a short one.
        let _ = poll(&mut polled, timeout.as_ref());
        self.sleeping.store(false, Ordering::SeqCst);
        let mut rings = [0; 64];
        while (&self.woken).read(&mut rings).is_ok_and(|n| n == rings.len()) {}
        let waits = self.source.figures.queue_depth.load(Ordering::Relaxed) > 0;
        if !waits && beat.is_some_and(|beat| self.sent.elapsed() >= beat) {
            self.append(unix_seconds(), &[]);
        }
    }
}
