//! Runs ten thousand random schedules: sequences of cache changes, dropped batches, reconnects, replays,
//! cache clears and restarts. A subscriber that has received the last sequence number must have exactly the
//! blocks in the server's prefix index. Cache, event feed and replay journal are those of the server, but
//! there are no sockets.

use crate::schedule_rng::InterleavingRng;
use kvcache::{
    BlockHasher, BlockTables, ExtraKeys, KvCache, KvConfig, PrefixCacheInsertOutcome,
    SequenceContent, TableEntries,
};
use metrics::kv_events::KvEventFormat;
use metrics::kv_events::{
    BatchArrival, DecodedKvEvent, EventJournal, ExternalBlockHash, FeedLimits, KvEventEncoder,
    KvEventFeed, PublishedBatch, PublisherCounters, PublisherWaker, QueuedKvEvents,
    SequenceNumberTracker, SubscriberBlocks, decode,
};
use protocol::{KvEvent, KvGroup, KvKind, KvSpec, Token};
use std::collections::{BTreeSet, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;

const SCHEDULES: u64 = 10_000;
const BLOCK_TOKENS: u32 = 2;

/// A server reduced to a KV cache with few blocks, the feed of its events, and the replay journal of its
/// publisher.
struct InterleavingServer {
    kv: KvCache,
    hasher: BlockHasher,
    held_tables: Vec<BlockTables>,
    feed: KvEventFeed,
    changes: Receiver<QueuedKvEvents>,
    counters: Arc<PublisherCounters>,
    journal: EventJournal,
}

/// Keeps the read ends of sockets open. A feed writes to the other end of its socket to wake the publisher;
/// the tests never read.
struct WakerSockets(Vec<UnixStream>);

impl InterleavingServer {
    fn start(
        rng: &mut InterleavingRng,
        clock: u64,
        sockets: &mut WakerSockets,
    ) -> (Self, PublishedBatch) {
        let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
        let spec = KvSpec { block_tokens: BLOCK_TOKENS, groups: vec![group] };
        let config = KvConfig::new(spec, 4 + rng.below(12), [1, 2]);
        let counters = Arc::new(PublisherCounters::default());
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        sockets.0.push(far);
        let waker = PublisherWaker::new(near, Arc::new(AtomicBool::new(false)));
        // The feed's queue is limited both by number of batches and by bytes; which limit is reached first is
        // random.
        let batches = 1 + rng.below(4) as usize;
        let bytes = if rng.one_in(2) { u64::MAX } else { u64::from(1 + rng.below(2_000)) };
        let limits = FeedLimits { batches, bytes };
        let (feed, changes) = KvEventFeed::new(limits, config.blocks, waker, Arc::clone(&counters));
        let format = if rng.one_in(2) { KvEventFormat::Map } else { KvEventFormat::Array };
        let encoder = KvEventEncoder {
            format,
            rank: 0,
            block_tokens: BLOCK_TOKENS,
            medium: "GPU",
            kinds: vec![protocol::KvKind::Full],
            token_ids: !rng.one_in(8),
        };
        let mut journal = EventJournal::new(encoder, clock, rng.below(12) as usize);
        let first = journal.append(0.0, &[KvEvent::Cleared]).unwrap();
        let kv = KvCache::new(&config).unwrap();
        let hasher = config.block_hasher();
        let server = Self { kv, hasher, held_tables: Vec::new(), feed, changes, counters, journal };
        (server, first)
    }

    /// Runs one step of the server: changes the cache, and passes the resulting KV events to the queue of the
    /// publisher.
    fn step(&mut self, rng: &mut InterleavingRng) {
        match rng.below(12) {
            0 => self.kv.clear(),
            1..=4 if !self.held_tables.is_empty() => {
                let at = rng.below(self.held_tables.len() as u32) as usize;
                let mut tables = self.held_tables.swap_remove(at);
                self.kv.free(&mut tables);
            }
            5 => {}
            _ => self.request(rng),
        }
        if self.kv.has_events() {
            self.feed.add(self.kv.take_events());
        }
        self.feed.flush();
    }

    /// Adds a random prompt to the cache. Prompts have few distinct tokens and one of two salts, so that many
    /// of them share prefixes.
    fn request(&mut self, rng: &mut InterleavingRng) {
        let length = BLOCK_TOKENS + rng.below(9);
        let tokens: Vec<Token> = (0..length).map(|_| rng.below(2)).collect();
        let extra = ExtraKeys::salted(rng.one_in(3).then(|| "a".to_owned()));
        let mut keys = Vec::new();
        self.hasher.extend_keys(&mut keys, &tokens, extra.as_deref());
        let content =
            SequenceContent { tokens: &tokens, block_keys: &keys, extra_keys: extra.as_ref() };
        let mut found = Vec::new();
        let hit = self.kv.match_prefix(content, &mut found);
        let more = self.kv.blocks_for(length) - hit.blocks;
        if more + hit.evictable > self.kv.available_blocks() {
            return;
        }
        let mut tables = BlockTables::default();
        self.kv.pin(&mut tables, hit.blocks, &found);
        self.kv.grow(&mut tables, TableEntries::all(hit.blocks + more));
        for index in hit.blocks..length / BLOCK_TOKENS {
            if self.kv.publish(&mut tables, 0, index, content) == PrefixCacheInsertOutcome::Rejected
            {
                break;
            }
        }
        self.held_tables.push(tables);
    }

    /// Encodes the KV events in the feed's queue as batches, as the publisher's thread does, and appends the
    /// batches to `sent`.
    fn publish(&mut self, sent: &mut Vec<PublishedBatch>) {
        while let Ok(changes) = self.changes.try_recv() {
            self.counters.record_dequeued(&changes);
            let entry = match changes {
                QueuedKvEvents::Step(ts, events) => self.journal.append(ts, &events),
                QueuedKvEvents::Backlog(ts, backlog) => self.journal.append_backlog(ts, *backlog),
            };
            sent.push(entry.unwrap());
        }
    }

    fn index(&self) -> BTreeSet<ExternalBlockHash> {
        self.kv.indexed_hashes(0).map(|hash| ExternalBlockHash::Number(hash.0)).collect()
    }
}

/// A subscriber whose connection loses batches. It starts at sequence number 0, so that it requests a full
/// replay, as routers do.
struct InterleavingSubscriber {
    sequence_tracker: SequenceNumberTracker,
    cached_hashes: SubscriberBlocks,
    connection: VecDeque<PublishedBatch>,
    gaps: u32,
}

impl InterleavingSubscriber {
    /// Reads all batches on the connection, and requests a replay after each gap. Unless `reliable`, a replay
    /// may be interrupted.
    fn read(&mut self, server: &mut InterleavingServer, rng: &mut InterleavingRng, reliable: bool) {
        while let Some(entry) = self.connection.pop_front() {
            match self.sequence_tracker.check(entry.seq) {
                BatchArrival::Duplicate => {}
                BatchArrival::Next => self.take(&entry),
                BatchArrival::Gap { from } => {
                    self.gaps += 1;
                    self.catch_up(server, rng, reliable, from);
                    if !reliable
                        && self.sequence_tracker.check(entry.seq) != BatchArrival::Duplicate
                    {
                        return; // The gap in the sequence numbers of the next batch leads to another replay.
                    }
                }
            }
        }
    }

    fn catch_up(
        &mut self,
        server: &mut InterleavingServer,
        rng: &mut InterleavingRng,
        reliable: bool,
        from: u64,
    ) {
        let mut replay = server.journal.replay(1.0, from).unwrap();
        while let Some(entry) = server.journal.next_batch(1.0, &mut replay).unwrap() {
            if !reliable && rng.one_in(6) {
                return;
            }
            self.take(&entry);
        }
    }

    fn take(&mut self, entry: &PublishedBatch) {
        let mut broken = Vec::new();
        for event in decode(&entry.payload).unwrap().events {
            self.cached_hashes.apply(&event, &mut broken);
        }
        assert_eq!(broken, [], "batch {}", entry.seq);
        self.sequence_tracker.advance(entry.seq);
    }
}

/// Numbers of dropped batches, gaps, restarts and late joins in all schedules. The test checks that these
/// events have happened.
#[derive(Default)]
struct InterleavingCounts {
    dropped: u64,
    gaps: u32,
    restarts: u32,
    late_joins: u32,
}

fn schedule(seed: u64, counts: &mut InterleavingCounts) {
    let mut rng = InterleavingRng::new(seed);
    let mut sockets = WakerSockets(Vec::new());
    let mut clock = 1_000;
    let (mut server, first) = InterleavingServer::start(&mut rng, clock, &mut sockets);
    let mut subscriber = InterleavingSubscriber {
        sequence_tracker: SequenceNumberTracker::at(0),
        cached_hashes: SubscriberBlocks::default(),
        connection: VecDeque::new(),
        gaps: 0,
    };
    let joins_late = rng.one_in(3);
    counts.late_joins += u32::from(joins_late);
    if !joins_late {
        subscriber.connection.push_back(first);
    }
    // In each step, the publisher runs with probability 1 / `pace`.
    let pace = 1 + rng.below(12);
    for step in 0..10 + rng.below(50) {
        server.step(&mut rng);
        let mut sent = Vec::new();
        if rng.one_in(pace) {
            server.publish(&mut sent);
        }
        if rng.one_in(60) {
            clock = server.journal.last().unwrap() + 1 + u64::from(rng.below(1_000));
            counts.dropped += server.counters.dropped.load(Ordering::Relaxed);
            let (restarted, first) = InterleavingServer::start(&mut rng, clock, &mut sockets);
            (server, sent) = (restarted, vec![first]);
            counts.restarts += 1;
        }
        let connected = !(joins_late && step < 8);
        sent.retain(|_| connected && !rng.one_in(5));
        subscriber.connection.extend(sent);
        if rng.one_in(2) {
            subscriber.read(&mut server, &mut rng, false);
        }
        if rng.one_in(40) {
            subscriber.connection.clear(); // The connection has broken, and its batches are lost.
        }
    }
    finish_schedule(&mut server, &mut subscriber, &mut rng, seed);
    counts.dropped += server.counters.dropped.load(Ordering::Relaxed);
    counts.gaps += subscriber.gaps;
}

/// Publishes all queued events and one empty batch. The subscriber's set of blocks must then equal the
/// server's prefix index.
fn finish_schedule(
    server: &mut InterleavingServer,
    subscriber: &mut InterleavingSubscriber,
    rng: &mut InterleavingRng,
    seed: u64,
) {
    let mut sent = Vec::new();
    server.publish(&mut sent);
    server.feed.flush();
    server.publish(&mut sent);
    let heartbeat = server.journal.append(2.0, &[]).unwrap();
    subscriber.connection.push_back(heartbeat);
    subscriber.read(server, rng, true);
    let cached_hashes: BTreeSet<ExternalBlockHash> =
        subscriber.cached_hashes.hashes().cloned().collect();
    assert_eq!(cached_hashes, server.index(), "schedule {seed}");
    assert_eq!(cached_hashes.len(), server.journal.blocks(), "schedule {seed}");
    server.kv.check(server.held_tables.iter());
}

#[test]
fn subscriber_at_last_sequence_knows_the_index() {
    let mut counts = InterleavingCounts::default();
    for seed in 0..SCHEDULES {
        schedule(seed, &mut counts);
    }
    let InterleavingCounts { dropped, gaps, restarts, late_joins: joined_late } = counts;
    assert!(dropped > 1_000 && gaps > 10_000 && restarts > 1_000 && joined_late > 1_000);
}

/// While the publisher is stalled, the events that do not fit in the queue form a backlog of at most twice as
/// many blocks as the KV pool has. Once half of the queue is free, the backlog is sent as one batch, which
/// starts with a clear event.
#[test]
fn stalled_publisher_catches_up_in_one_batch() {
    for seed in 0..200 {
        let mut rng = InterleavingRng::new(seed);
        let (mut server, first) =
            InterleavingServer::start(&mut rng, 0, &mut WakerSockets(Vec::new()));
        let mut subscriber = InterleavingSubscriber {
            sequence_tracker: SequenceNumberTracker::at(0),
            cached_hashes: SubscriberBlocks::default(),
            connection: VecDeque::from([first]),
            gaps: 0,
        };
        for _ in 0..50 + rng.below(500) {
            server.step(&mut rng);
        }
        assert!(server.counters.dropped.load(Ordering::Relaxed) > 0, "schedule {seed}");
        let (mut queued_batches, mut backlog_batches) = (Vec::new(), Vec::new());
        server.publish(&mut queued_batches);
        server.feed.flush();
        let pool = server.kv.counts().pool as usize;
        for changes in server.changes.try_iter() {
            let QueuedKvEvents::Backlog(ts, backlog) = changes else {
                panic!("schedule {seed}: a step")
            };
            assert!(backlog.len() <= 2 * pool, "{} of {pool} blocks", backlog.len());
            backlog_batches.push(server.journal.append_backlog(ts, *backlog).unwrap());
        }
        let [batch] = &backlog_batches[..] else {
            panic!("schedule {seed}: {} batches", backlog_batches.len())
        };
        assert_eq!(decode(&batch.payload).unwrap().events[0], DecodedKvEvent::AllBlocksCleared);
        subscriber.connection.extend(queued_batches.into_iter().chain(backlog_batches));
        subscriber.read(&mut server, &mut rng, true);
        let cached_hashes: BTreeSet<ExternalBlockHash> =
            subscriber.cached_hashes.hashes().cloned().collect();
        assert_eq!((cached_hashes, subscriber.gaps), (server.index(), 0), "schedule {seed}");
    }
}
