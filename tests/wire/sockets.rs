//! Tests of the KV-event publisher over sockets: frames, replay, topics, and a subscriber that never reads.

use crate::kv_event_replay::{self, config};
use metrics::kv_events::{
    BoundPublisher, DecodedKvEvent, KvEventFeed, KvEventPublisher, SequenceNumberTracker,
    TopicFields, decode,
};
use protocol::{BlockHash, KvEvent, KvGroup, KvKind, KvSpec};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zmq::{Context, Socket};

const WAIT_MS: i32 = 10_000;

fn start(extra: &serde_json::Value) -> (KvEventFeed, KvEventPublisher) {
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: 2, groups: vec![group] };
    let words =
        TopicFields { pod: "pod-0".to_owned(), model: "m".to_owned(), ..TopicFields::default() };
    let (feed, publisher) = BoundPublisher::open(&config(extra), words)
        .unwrap()
        .start(&spec, 1_000, Arc::default())
        .unwrap();
    // Waits until the first batch is published, so that a subscriber that connects later misses it.
    wait_for_batches(&publisher, 1);
    // The publisher counts a batch before it sends it, so the test also waits until the batch has been sent.
    std::thread::sleep(Duration::from_millis(50));
    (feed, publisher)
}

fn subscribe(context: &Context, publisher: &KvEventPublisher, topic: &str) -> Socket {
    let subscriber = context.socket(zmq::SUB).unwrap();
    subscriber.set_subscribe(topic.as_bytes()).unwrap();
    subscriber.set_rcvtimeo(WAIT_MS).unwrap();
    subscriber.connect(&publisher.source().endpoint).unwrap();
    subscriber
}

fn replay(publisher: &KvEventPublisher, start: u64) -> Vec<(u64, Vec<u8>)> {
    kv_event_replay::replay(publisher.source().replay_endpoint.as_ref().unwrap(), start, WAIT_MS)
}

fn stored(hash: u64) -> Vec<KvEvent> {
    vec![KvEvent::Stored {
        hashes: vec![BlockHash(hash)],
        parent: None,
        tokens: vec![1, 2],
        extra_keys: vec![Vec::new()],
        group: 0,
    }]
}

fn publish_events(feed: &mut KvEventFeed, events: Vec<KvEvent>) {
    feed.add(events);
    feed.flush();
}

fn wait_for_batches(publisher: &KvEventPublisher, batches: u64) {
    let start = Instant::now();
    while publisher.source().counters.batches.load(Ordering::Relaxed) < batches {
        assert!(start.elapsed() < Duration::from_mins(1));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn batches_have_three_frames_and_replays_equal_them() {
    let context = Context::new();
    let before_us = unix_us();
    let (mut feed, publisher) = start(&json!({"topic": "kv@{pod}@{model}"}));
    let subscriber = subscribe(&context, &publisher, "kv@pod-0@");
    std::thread::sleep(Duration::from_secs(1)); // ZMTP does not acknowledge subscriptions.
    for hash in 1..=500 {
        publish_events(&mut feed, stored(hash));
    }
    let epoch = publisher.source().counters.epoch.load(Ordering::Relaxed);
    assert!((before_us..=unix_us()).contains(&epoch), "{epoch} is not now");
    let mut live = Vec::new();
    for seq in epoch + 1..=epoch + 500 {
        let frames = subscriber.recv_multipart(0).unwrap();
        assert_eq!(frames.len(), 3);
        assert_eq!(frames[0], b"kv@pod-0@m");
        assert_eq!(frames[1], seq.to_be_bytes());
        live.push((seq, frames[2].clone()));
    }
    let all = replay(&publisher, 0);
    assert_eq!(decode(&all[0].1).unwrap().events, [DecodedKvEvent::AllBlocksCleared]);
    assert_eq!((all[0].0, &all[1..]), (epoch, live.as_slice()));
    assert_eq!(replay(&publisher, epoch + 490), live[489..]);
    assert_eq!(replay(&publisher, epoch + 501), []);
    let counters = &publisher.source().counters;
    assert_eq!(counters.batches.load(Ordering::Relaxed), 501);
    assert_eq!(
        (counters.replays.load(Ordering::Relaxed), counters.errors.load(Ordering::Relaxed)),
        (3, 0)
    );
    assert_eq!(publisher.source().describe()["last_seq"], epoch + 500);
    drop(feed);
    publisher.finish();
}

#[test]
fn batches_dropped_from_the_ring_become_a_snapshot() {
    let (mut feed, publisher) = start(&json!({"buffer_steps": 10, "sequence_start": "zero"}));
    for hash in 1..=100 {
        publish_events(&mut feed, stored(hash));
    }
    publish_events(
        &mut feed,
        vec![KvEvent::Removed { hashes: vec![BlockHash(1), BlockHash(50)], group: 0 }],
    );
    wait_for_batches(&publisher, 102);
    let [(seq, payload)] = &replay(&publisher, 5)[..] else { panic!("not one batch") };
    assert_eq!(*seq, 101);
    let events = decode(payload).unwrap().events;
    assert_eq!(events[0], DecodedKvEvent::AllBlocksCleared);
    assert_eq!(events.len(), 99, "a clear and 98 blocks without a parent");
    assert_eq!(replay(&publisher, 92).len(), 10);
    assert_eq!(publisher.source().counters.snapshots.load(Ordering::Relaxed), 1);
}

#[test]
fn idle_publisher_sends_heartbeats_and_ignores_garbage() {
    let context = Context::new();
    let (_feed, publisher) = start(&json!({"idle_beat_s": 0.02}));
    let subscriber = subscribe(&context, &publisher, "");
    let mut sequence_tracker = SequenceNumberTracker::default();
    for _ in 0..5 {
        let frames = subscriber.recv_multipart(0).unwrap();
        let seq = u64::from_be_bytes(frames[1][..].try_into().unwrap());
        assert_eq!(sequence_tracker.check(seq), metrics::kv_events::BatchArrival::Next);
        sequence_tracker.advance(seq);
        assert_eq!(decode(&frames[2]).unwrap().events, []);
    }
    let dealer = context.socket(zmq::DEALER).unwrap();
    dealer.connect(publisher.source().replay_endpoint.as_ref().unwrap()).unwrap();
    dealer.send("nonsense", 0).unwrap();
    let start = Instant::now();
    while publisher.source().counters.malformed.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < Duration::from_mins(1));
    }
    assert!(!replay(&publisher, 0).is_empty());
}

#[test]
fn stuck_subscriber_loses_only_its_own_batches() {
    let context = Context::new();
    let (mut feed, publisher) = start(&json!({"hwm": 10, "buffer_steps": 100}));
    let stuck = subscribe(&context, &publisher, "");
    stuck.set_rcvhwm(1).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let large: Vec<u32> = vec![7; 20_000];
    let mut slowest = Duration::ZERO;
    for hash in 1..=2_000 {
        let events = vec![KvEvent::Stored {
            hashes: vec![BlockHash(hash)],
            parent: None,
            tokens: large.clone(),
            extra_keys: vec![Vec::new()],
            group: 0,
        }];
        let start = Instant::now();
        publish_events(&mut feed, events);
        slowest = slowest.max(start.elapsed());
        std::thread::sleep(Duration::from_micros(200));
    }
    wait_for_batches(&publisher, 2_001);
    let counters = &publisher.source().counters;
    assert_eq!(
        (counters.dropped.load(Ordering::Relaxed), counters.errors.load(Ordering::Relaxed)),
        (0, 0)
    );
    // The limit is high, because other processes may delay passing a batch to the publisher.
    assert!(slowest < Duration::from_secs(10), "a hand-over took {slowest:?}");
    println!("slowest hand-over with a stuck reader: {slowest:?}");
    let mut seqs = Vec::new();
    stuck.set_rcvtimeo(500).unwrap();
    while let Ok(frames) = stuck.recv_multipart(0) {
        seqs.push(u64::from_be_bytes(frames[1][..].try_into().unwrap()));
    }
    assert!(seqs.len() < 2_000, "all {} batches were kept for it", seqs.len());
    assert!(seqs.is_sorted(), "numbers only grow");
}

#[test]
fn queue_of_a_stuck_subscriber_is_bounded_in_bytes() {
    const BOUND: usize = 4 << 20;
    const BATCHES: u64 = 400;
    let context = Context::new();
    let (mut feed, publisher) = start(&json!({"max_queue_bytes": BOUND, "buffer_steps": 10}));
    let stuck = context.socket(zmq::SUB).unwrap();
    stuck.set_rcvhwm(1).unwrap();
    stuck.set_subscribe(b"").unwrap();
    stuck.connect(&publisher.source().endpoint).unwrap();
    // Publishes batches until the subscriber receives one, which shows that the subscription is active.
    stuck.set_rcvtimeo(10).unwrap();
    let (start, mut batches) = (Instant::now(), 1);
    while stuck.recv_multipart(0).is_err() {
        assert!(start.elapsed() < Duration::from_secs(20), "no batch");
        publish_events(&mut feed, stored(1));
        batches += 1;
    }
    let mut bytes = 0;
    for hash in 1..=BATCHES {
        let large = KvEvent::Stored {
            hashes: vec![BlockHash(hash)],
            parent: None,
            tokens: vec![100_000; 20_000],
            extra_keys: vec![Vec::new()],
            group: 0,
        };
        publish_events(&mut feed, vec![large]);
        // Waits until the publisher has processed the batch, so that the queue of the publisher is never
        // full.
        wait_for_batches(&publisher, batches + hash);
    }
    assert_eq!(publisher.source().counters.dropped.load(Ordering::Relaxed), 0);
    stuck.set_rcvtimeo(1_000).unwrap();
    while let Ok(frames) = stuck.recv_multipart(0) {
        bytes += frames[2].len();
    }
    // In addition to the publisher's queue for this subscriber, socket buffers contain some megabytes.
    let sent = BATCHES as usize * 100_000;
    assert!((BOUND / 2..sent / 2).contains(&bytes), "{bytes} of {sent} bytes were kept for it");
    // The subscriber receives the newest batch, although earlier batches were dropped; its sequence number
    // reveals the gap.
    publish_events(&mut feed, stored(1));
    stuck.set_rcvtimeo(WAIT_MS).unwrap();
    let frames = stuck.recv_multipart(0).unwrap();
    let seq = u64::from_be_bytes(frames[1][..].try_into().unwrap());
    assert_eq!(seq, publisher.source().counters.seq.load(Ordering::Relaxed));
}

/// Checks that the subscriber receives batches. Publishes until the subscription is active, because ZMTP does
/// not acknowledge subscriptions.
fn assert_receives_batches(
    feed: &mut KvEventFeed,
    subscriber: &Socket,
    publisher: &KvEventPublisher,
) {
    subscriber.set_rcvtimeo(10).unwrap();
    let start = Instant::now();
    while subscriber.recv_multipart(0).is_err() {
        publish_events(feed, stored(1));
        assert!(start.elapsed() < Duration::from_secs(20), "no batch");
    }
    let last = publisher.source().counters.batches.load(Ordering::Relaxed);
    publish_events(feed, stored(1));
    wait_for_batches(publisher, last + 1);
    subscriber.set_rcvtimeo(WAIT_MS).unwrap();
    let expected = publisher.source().counters.seq.load(Ordering::Relaxed).to_be_bytes();
    while subscriber.recv_multipart(0).unwrap()[1] != expected {}
}

#[test]
fn publisher_reconnects_to_a_binding_collector() {
    let context = Context::new();
    let bind = |at: &str| {
        let collector = context.socket(zmq::SUB).unwrap();
        collector.set_linger(0).unwrap();
        collector.set_subscribe(b"").unwrap();
        collector.bind(at).unwrap();
        collector
    };
    let collector = bind("tcp://127.0.0.1:*");
    let at = collector.get_last_endpoint().unwrap().unwrap();
    let (mut feed, publisher) = start(&json!({"endpoint": at, "bind": false}));
    assert_eq!((publisher.source().binds, &publisher.source().endpoint), (false, &at));
    assert_receives_batches(&mut feed, &collector, &publisher);
    collector.unbind(&at).unwrap();
    drop(collector);
    let start = Instant::now();
    let again = loop {
        let socket = context.socket(zmq::SUB).unwrap();
        socket.set_subscribe(b"").unwrap();
        match socket.bind(&at) {
            Ok(()) => break socket,
            Err(_) => assert!(start.elapsed() < Duration::from_secs(20), "{at} stays taken"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_receives_batches(&mut feed, &again, &publisher);
}

#[test]
fn ipc_endpoints_publish_and_replay() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| format!("ipc://{}", folder.path().join(name).display());
    let keys = json!({"endpoint": at("events"), "replay_endpoint": at("replay")});
    let (mut feed, publisher) = start(&keys);
    let subscriber = subscribe(&Context::new(), &publisher, "");
    assert_receives_batches(&mut feed, &subscriber, &publisher);
    assert!(replay(&publisher, 0).len() >= 2);
    drop(feed);
    publisher.finish();
    let start = Instant::now();
    while folder.path().join("events").exists() {
        assert!(start.elapsed() < Duration::from_secs(20), "the file stays");
    }
}

#[test]
fn subscriber_zmtp_heartbeats_are_answered() {
    let (mut feed, publisher) = start(&json!({}));
    let subscriber = Context::new().socket(zmq::SUB).unwrap();
    subscriber.set_heartbeat_ivl(20).unwrap();
    subscriber.set_heartbeat_timeout(200).unwrap();
    subscriber.set_reconnect_ivl(60_000).unwrap();
    subscriber.set_subscribe(b"").unwrap();
    subscriber.connect(&publisher.source().endpoint).unwrap();
    assert_receives_batches(&mut feed, &subscriber, &publisher);
    // By now, a subscriber whose heartbeats had no reply would have disconnected permanently.
    std::thread::sleep(Duration::from_secs(1));
    assert_receives_batches(&mut feed, &subscriber, &publisher);
    assert_eq!(publisher.source().counters.subscribers.load(Ordering::Relaxed), 1);
}

#[test]
fn address_in_use_error_names_the_address() {
    let (_feed, publisher) = start(&json!({}));
    let taken = publisher.source().endpoint.clone();
    let again = BoundPublisher::open(&config(&json!({"endpoint": taken})), TopicFields::default());
    let error = again.err().unwrap().to_string();
    assert!(error.contains(&taken) && error.contains("in use"), "{error}");
    let wrong = BoundPublisher::open(&config(&json!({"topic": "{nope}"})), TopicFields::default());
    assert!(wrong.err().unwrap().to_string().contains("{nope}"));
}

fn unix_us() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_micros() as u64
}
