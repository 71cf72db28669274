//! Publisher thread: owns both sockets of one replica and sleeps until there is something to send.

use super::backlog::EventBacklog;
use super::config::{InitialSequenceNumber, KvEventsConfig};
use super::encode::KvEventEncoder;
use super::endpoint::TopicFields;
use super::feed::{FeedLimits, KvEventFeed, PublisherWaker, QueuedKvEvents, unix_seconds};
use super::journal::{EventJournal, PublishedBatch};
use super::pub_socket::PubSocket;
use super::publisher_counters::{PublisherCounters, count};
use super::replay_socket::{ReplayContext, ReplaySocket};
use super::sockets::{self, PublisherSockets, SocketError};
use super::source::KvEventPublisherInfo;
use protocol::{KvEvent, KvSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Maximum number of queued batches that are published before sockets are polled and replays are continued.
const BATCHES_PER_TURN: usize = 1024;
/// Maximum time to send the remaining batches to subscribers at shutdown.
const FLUSH: Duration = Duration::from_secs(1);
/// Maximum sleep of the publisher thread while a peer has a deadline or is throttled.
const PEER_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Storage medium in the events, for any device: vLLM's name of the primary tier.
const PRIMARY_MEDIUM: &str = "GPU";

/// Publisher with open sockets, which starts when the model is loaded.
pub struct BoundPublisher {
    config: KvEventsConfig,
    topic_fields: TopicFields,
    sockets: PublisherSockets,
}

impl BoundPublisher {
    /// Opens the sockets of one DP rank and chooses the epoch (the sequence number of the first batch).
    ///
    /// Errors: an address is in use or not one of this machine, or the configuration is invalid.
    pub fn open(
        config: &KvEventsConfig,
        mut topic_fields: TopicFields,
    ) -> Result<Self, SocketError> {
        topic_fields.epoch = match config.sequence_start {
            InitialSequenceNumber::Clock => (unix_seconds() * 1e6) as u64,
            InitialSequenceNumber::Zero => 0,
        };
        let sockets = sockets::open(config, &topic_fields)?;
        Ok(Self { config: config.clone(), topic_fields, sockets })
    }

    /// Starts the publisher thread for a KV cache of layout `spec` with a KV pool of `blocks` blocks; the
    /// thread updates `counters`. Returns the feed for the scheduler thread and the publisher's handle.
    pub fn start(
        self,
        spec: &KvSpec,
        blocks: u32,
        counters: Arc<PublisherCounters>,
    ) -> io::Result<(KvEventFeed, KvEventPublisher)> {
        let Self { config, topic_fields, sockets } = self;
        let PublisherSockets { publish, endpoint, binds, replay, topic } = sockets;
        let encoder = KvEventEncoder {
            format: config.format,
            rank: topic_fields.rank,
            block_tokens: spec.block_tokens,
            medium: PRIMARY_MEDIUM,
            kinds: spec.groups.iter().map(|group| group.kind).collect(),
            token_ids: config.token_ids,
        };
        let journal = EventJournal::new(encoder, topic_fields.epoch, config.buffer_steps);
        let (wake_tx, wake_rx) = UnixStream::pair()?;
        wake_tx.set_nonblocking(true)?;
        wake_rx.set_nonblocking(true)?;
        let sleeping = Arc::new(AtomicBool::new(false));
        let (replay, replay_endpoint) =
            replay.map(|bound| (bound.listener, bound.endpoint)).unzip();
        let publish = PubSocket::new(&config, publish, &topic, &wake_tx, Arc::clone(&counters))?;
        let source = Arc::new(KvEventPublisherInfo {
            rank: topic_fields.rank,
            endpoint,
            binds,
            replay_endpoint,
            topic: topic.clone(),
            block_tokens: spec.block_tokens,
            counters,
            config,
        });
        source.counters.epoch.store(topic_fields.epoch, Ordering::Relaxed);
        let waker = PublisherWaker::new(wake_tx, Arc::clone(&sleeping));
        let (feed, changes) = KvEventFeed::new(
            feed_limits(&source.config),
            blocks,
            waker,
            Arc::clone(&source.counters),
        );
        let publisher_loop = PublisherLoop {
            journal,
            changes,
            publish,
            replay: replay.map(|listener| ReplaySocket::new(listener, &topic)),
            wake_socket: wake_rx,
            sleeping,
            source: Arc::clone(&source),
            last_sent: Instant::now(),
        };
        let named = thread::Builder::new().name(format!("kv-events-{}", topic_fields.rank));
        let thread = named.spawn(move || publisher_loop.run())?;
        let publisher = KvEventPublisher { source, thread, feed: feed.liveness() };
        Ok((feed, publisher))
    }
}

/// Limits of the publisher's queue.
fn feed_limits(config: &KvEventsConfig) -> FeedLimits {
    FeedLimits { batches: config.max_queue_size, bytes: config.max_queue_bytes }
}

/// Handle to a running publisher. The publisher ends when its feed is dropped.
pub struct KvEventPublisher {
    source: Arc<KvEventPublisherInfo>,
    thread: JoinHandle<()>,
    feed: Weak<()>,
}

impl KvEventPublisher {
    /// Returns the description of the publisher, with its counters.
    pub fn source(&self) -> &Arc<KvEventPublisherInfo> {
        &self.source
    }

    /// Waits briefly until all queued batches are sent; returns at once if the feed still exists.
    pub fn finish(self) {
        if self.feed.strong_count() > 0 {
            return; // The publisher thread ends only when the feed is dropped.
        }
        let deadline = Instant::now() + FLUSH;
        while !self.thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Loop of the publisher thread, with all state that the thread owns.
struct PublisherLoop {
    journal: EventJournal,
    changes: Receiver<QueuedKvEvents>,
    publish: PubSocket,
    replay: Option<ReplaySocket>,
    wake_socket: UnixStream,
    sleeping: Arc<AtomicBool>,
    source: Arc<KvEventPublisherInfo>,
    /// Time at which the last batch was published.
    last_sent: Instant,
}

impl PublisherLoop {
    fn run(mut self) {
        self.append(unix_seconds(), &[KvEvent::Cleared]);
        loop {
            let Ok(mut more) = self.publish_waiting() else {
                return self.publish.flush(FLUSH);
            };
            let now = Instant::now();
            more |= self.publish.poll(now);
            if let Some(replay) = &mut self.replay {
                let (journal, counters) = (&mut self.journal, &*self.source.counters);
                more |=
                    replay.poll(now, &mut ReplayContext { journal, counters, ts: unix_seconds() });
            }
            if !more {
                self.sleep();
            }
        }
    }

    /// Publishes the queued events of steps and backlogs; returns whether more may be queued.
    ///
    /// Errors: the feed was dropped and all its events are published.
    fn publish_waiting(&mut self) -> Result<bool, TryRecvError> {
        for _ in 0..BATCHES_PER_TURN {
            match self.changes.try_recv() {
                Ok(changes) => {
                    self.source.counters.record_dequeued(&changes);
                    match changes {
                        QueuedKvEvents::Step(ts, events) => self.append(ts, &events),
                        QueuedKvEvents::Backlog(ts, backlog) => self.append_backlog(ts, *backlog),
                    }
                }
                Err(TryRecvError::Empty) => return Ok(false),
                Err(disconnected @ TryRecvError::Disconnected) => return Err(disconnected),
            }
        }
        Ok(true)
    }

    /// Publishes the events of one step.
    fn append(&mut self, ts: f64, events: &[KvEvent]) {
        let batch = self.journal.append(ts, events);
        self.send(batch, events.len());
    }

    /// Publishes a batch with a clear and all cached blocks, which replaces the batches of dropped steps.
    fn append_backlog(&mut self, ts: f64, backlog: EventBacklog) {
        let batch = self.journal.append_backlog(ts, backlog);
        self.send(batch, 1 + self.journal.blocks());
    }

    fn send(&mut self, batch: io::Result<PublishedBatch>, events: usize) {
        let counters = &self.source.counters;
        let Ok(batch) = batch else {
            count(&counters.errors, 1);
            return;
        };
        counters.seq.store(batch.seq, Ordering::Relaxed);
        count(&counters.batches, 1);
        count(&counters.events, events as u64);
        // A slow subscriber may miss the batch; it detects the gap by the sequence number.
        let now = Instant::now();
        self.publish.send(batch.seq, batch.payload, now);
        self.last_sent = now;
    }

    /// Sleeps until changes are queued, a peer is ready, or a heartbeat is due.
    fn sleep(&mut self) {
        self.sleeping.store(true, Ordering::SeqCst);
        // Changes queued before `sleeping` was set have sent no wake-up: publish them now. The next poll of
        // the sockets sends the batches.
        let sent = self.last_sent;
        if !matches!(self.publish_waiting(), Ok(false)) || self.last_sent != sent {
            self.sleeping.store(false, Ordering::SeqCst);
            return;
        }
        let heartbeat_interval = self.source.config.idle_heartbeat_interval;
        self.poll_sockets(
            heartbeat_interval.map(|interval| interval.saturating_sub(self.last_sent.elapsed())),
        );
        self.sleeping.store(false, Ordering::SeqCst);
        let mut wake_bytes = [0; 64];
        while (&self.wake_socket).read(&mut wake_bytes).is_ok_and(|n| n == wake_bytes.len()) {}
        let has_queued = self.source.counters.queue_depth.load(Ordering::Relaxed) > 0;
        if !has_queued
            && heartbeat_interval.is_some_and(|interval| self.last_sent.elapsed() >= interval)
        {
            self.append(unix_seconds(), &[]);
        }
    }

    /// Waits until the feed sends a wake-up or a socket is ready, for at most `timeout`. The wait is shorter
    /// if a peer has a deadline or is throttled.
    fn poll_sockets(&self, mut timeout: Option<Duration>) {
        let mut polled = vec![PollFd::new(&self.wake_socket, PollFlags::IN)];
        let mut needs_time = self.publish.add_poll_fds(&mut polled);
        needs_time |= self.replay.as_ref().is_some_and(|replay| replay.add_poll_fds(&mut polled));
        if needs_time {
            timeout =
                Some(timeout.map_or(PEER_CHECK_INTERVAL, |left| left.min(PEER_CHECK_INTERVAL)));
        }
        // `Timespec` cannot represent very long timeouts; the thread then waits without a timeout.
        let timespec = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // If a signal interrupts `poll`, the thread only wakes earlier, so the error needs no handling.
        let _ = poll(&mut polled, timespec.as_ref());
    }
}
