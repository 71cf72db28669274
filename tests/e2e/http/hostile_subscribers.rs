//! Hostile clients of the KV-event sockets: the server's memory does not grow, and well-behaved subscribers
//! get every batch.

use super::server_process::ServerProcess;
use crate::deadlines::BoundedJoin;
use crate::http_client::connect_within;
use crate::http_client::{get, post};
use crate::kv_event_replay;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use zmq::{Context, Socket};

/// ZMTP 3.0 greeting with the NULL mechanism.
const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    let [n, u, l, ..] = *b"NULL";
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (n, u, l, l);
    greeting
};
const READY_SUB: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";
const READY_DEALER: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER";
/// Duration of an attack that would not end by itself.
const ATTACK: Duration = Duration::from_secs(3);
/// Maximum growth of resident memory in an attack: buffers of the open connections, and noise of the
/// measurement.
const GROWTH_KIB_MAX: u64 = 24 << 10;

/// Server whose KV-event publisher is attacked, with a well-behaved subscriber.
struct AttackedPublisher {
    process: ServerProcess,
    publish: SocketAddr,
    replay: SocketAddr,
    subscriber: Socket,
    next_seq: u64,
    calm_kib: u64,
}

fn address(source: &Value, key: &str) -> SocketAddr {
    source[key].as_str().unwrap().strip_prefix("tcp://").unwrap().parse().unwrap()
}

impl AttackedPublisher {
    fn start() -> Self {
        let config = json!({"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0",
            "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv@pod@model"});
        let process =
            ServerProcess::start(&["--threads", "1", "--kv-events-config", &config.to_string()]);
        let source = get(process.address, "/kv_event_sources").json()["0"].clone();
        let subscriber = Context::new().socket(zmq::SUB).unwrap();
        subscriber.set_subscribe(b"kv@").unwrap();
        subscriber.set_rcvtimeo(20_000).unwrap();
        subscriber.connect(source["endpoint"].as_str().unwrap()).unwrap();
        let (publish, replay) = (address(&source, "endpoint"), address(&source, "replay_endpoint"));
        let mut attacked = Self { process, publish, replay, subscriber, next_seq: 0, calm_kib: 0 };
        let start = Instant::now();
        while attacked.source("subscribers") == 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "no subscription");
        }
        std::thread::sleep(Duration::from_millis(200)); // ZMTP does not acknowledge subscriptions.
        (0..20).for_each(|_| attacked.publish());
        attacked.calm_kib = attacked.resident_kib();
        attacked
    }

    fn source(&self, key: &str) -> u64 {
        get(self.process.address, "/kv_event_sources").json()["0"][key].as_u64().unwrap()
    }

    fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Sends a request whose KV events are published as a batch, and checks that the subscriber receives it
    /// next.
    fn publish(&mut self) {
        let prompt = vec![65 + self.next_seq % 20; 64];
        let body =
            json!({"prompt": prompt, "max_tokens": 1, "cache_salt": self.next_seq.to_string()});
        let before = self.source("last_seq");
        assert_eq!(post(self.process.address, "/v1/completions", &body).status, 200);
        let start = Instant::now();
        let last = loop {
            let last = self.source("last_seq");
            if last > before {
                break last;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "no batch");
        };
        loop {
            let frames = self.subscriber.recv_multipart(0).expect("a batch for the subscriber");
            assert_eq!(frames[0], b"kv@pod@model");
            let seq = kv_event_replay::sequence_number(&frames[1]);
            assert!(self.next_seq == 0 || seq == self.next_seq, "{seq} after {}", self.next_seq);
            self.next_seq = seq + 1;
            if seq >= last {
                return;
            }
        }
    }

    /// Checks the growth of the server's memory during an attack, then after further batches were published,
    /// and finally after the connections of the attack were closed by dropping `held`.
    fn survives<T>(&mut self, name: &str, held: T) {
        let during = self.resident_kib();
        (0..3).for_each(|_| self.publish());
        let published = self.resident_kib();
        drop(held);
        std::thread::sleep(Duration::from_millis(500));
        self.publish();
        let after = self.resident_kib();
        let calm = self.calm_kib;
        println!(
            "{name}: {calm} KiB before, {during} during, {published} with batches, {after} after"
        );
        let most = during.max(published).max(after);
        assert!(most < calm + GROWTH_KIB_MAX, "{name}: {most} KiB, {calm} before");
    }
}

/// A connection on which the ZMTP handshake is complete.
fn peer(at: SocketAddr, ready: &[u8]) -> TcpStream {
    let mut stream = connect_within(at, Duration::from_secs(10)).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    stream.write_all(&GREETING).unwrap();
    stream.write_all(ready).unwrap();
    let (mut greeting, mut head) = ([0; 64], [0; 2]);
    stream.read_exact(&mut greeting).unwrap();
    stream.read_exact(&mut head).unwrap();
    stream.read_exact(&mut vec![0; usize::from(head[1])]).unwrap();
    stream
}

/// Sends chunks until the duration of an attack is over or the connection fails; returns the number of bytes
/// sent.
fn flood(stream: &mut TcpStream, mut piece: impl FnMut(u64) -> Vec<u8>) -> usize {
    let (start, mut bytes) = (Instant::now(), 0);
    for number in 0.. {
        let part = piece(number);
        match stream.write(&part) {
            // The socket may accept only the first bytes of a chunk. The ZMTP framing is then broken, which
            // is permitted in an attack.
            Ok(count) => bytes += count,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
        if start.elapsed() > ATTACK {
            break;
        }
    }
    bytes
}

/// Floods several connections with the same data and returns them open, with the number of bytes sent.
fn crowd(
    at: SocketAddr,
    ready: &'static [u8],
    piece: fn(u64) -> Vec<u8>,
) -> (Vec<TcpStream>, usize) {
    let threads: Vec<_> = (0..6)
        .map(|_| {
            std::thread::spawn(move || {
                let mut stream = peer(at, ready);
                let bytes = flood(&mut stream, piece);
                (stream, bytes)
            })
        })
        .collect();
    let ended = threads.into_iter().map(BoundedJoin::join_bounded);
    let (streams, bytes): (Vec<_>, Vec<_>) = ended.unzip();
    (streams, bytes.into_iter().sum())
}

#[test]
fn hostile_kv_event_peers_use_no_memory() {
    let mut attacked = AttackedPublisher::start();
    let (publish, replay) = (attacked.publish, attacked.replay);

    // Attack: subscriptions to topics of 5 MB.
    let mut topic = vec![2];
    topic.extend_from_slice(&5_000_001_u64.to_be_bytes());
    topic.push(1);
    topic.resize(5_000_010, b'x');
    let mut held = Vec::new();
    for _ in 0..30 {
        let mut stream = peer(publish, READY_SUB);
        // The server closes the connection before it has received the whole subscription.
        let _ = stream.write_all(&topic);
        held.push(stream);
    }
    attacked.survives("long topics", held);
    assert!(attacked.source("rejected_peers") >= 30);

    // Attack: subscriptions to as many long, distinct topics as the server reads.
    let (held, bytes) = crowd(publish, READY_SUB, |number| {
        let mut frame = vec![0, 200, 1];
        frame.extend_from_slice(&number.to_be_bytes());
        frame.resize(202, b'x');
        frame
    });
    attacked.survives(&format!("many topics ({bytes} bytes)"), held);
    assert!(attacked.source("ignored_subscriptions") > 1_000);

    // Attack: ZMTP messages with an endless sequence of frames, sent to the PUB and ROUTER sockets.
    for (name, at, ready) in [("PUB", publish, READY_SUB), ("ROUTER", replay, READY_DEALER)] {
        let (held, bytes) = crowd(at, ready, |_| [1, 1, b'x'].repeat(1_000));
        attacked.survives(&format!("endless message to {name} ({bytes} bytes)"), held);
    }

    // Attack: many connections that send only a part of the ZMTP greeting.
    for at in [publish, replay] {
        let mut held: Vec<_> =
            (0..600).map(|_| connect_within(at, Duration::from_secs(10)).unwrap()).collect();
        for stream in &mut held {
            let _ = stream.write(&GREETING[..20]); // The server closes connections if there are too many.
        }
        std::thread::sleep(Duration::from_millis(300));
        attacked.survives("600 silent connections", held);
    }

    // Attack: requests for replays from the first batch on, whose replies are never read.
    let (held, _) = crowd(replay, READY_DEALER, |_| {
        let mut request = vec![1, 0, 0, 8];
        request.extend_from_slice(&0_u64.to_be_bytes());
        request
    });
    attacked.survives("replays that are never read", held);

    // Attack: subscribers that never read their batches.
    let mut held: Vec<_> = (0..100).map(|_| peer(publish, READY_SUB)).collect();
    for stream in &mut held {
        stream.write_all(b"\x00\x01\x01").unwrap();
    }
    (0..20).for_each(|_| attacked.publish());
    attacked.survives("100 subscribers that read nothing", held);

    // Well-behaved clients still get a replay and live batches.
    let endpoint = format!("tcp://{replay}");
    assert!(!kv_event_replay::replay(&endpoint, 0, 20_000).is_empty());
}
