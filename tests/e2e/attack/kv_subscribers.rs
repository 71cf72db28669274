//! Attacks by KV-event subscribers that send long topics, many topics, or endless frames.

use super::target::{AttackTarget, REPLY_TIMEOUT};
use crate::http_client::connect_within;
use crate::rng::SimRng;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use zmq::Context;

/// Maximum size in bytes of a topic that an attack subscribes to.
const TOPIC_BYTES: u32 = 4 << 20;
/// Maximum number of bytes of an endless frame that are sent.
const ENDLESS_BYTES: usize = 64 << 20;
/// Maximum time for which an endless frame is sent.
const ENDLESS_TIME: Duration = Duration::from_secs(2);

/// Greeting of a ZMTP 3.0 peer without security (rfc.zeromq.org/spec/23).
fn greeting() -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    bytes.extend(b"NULL");
    bytes.resize(64, 0);
    bytes
}

/// ZMTP READY command of a peer with socket type `kind`.
fn ready(kind: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend((kind.len() as u32).to_be_bytes());
    body.extend(kind.as_bytes());
    [vec![0x04, body.len() as u8], body].concat()
}

/// A connection on which the ZMTP greeting and READY command of a peer have been sent.
fn peer(at: SocketAddr, kind: &str) -> Option<TcpStream> {
    let mut stream = connect_within(at, REPLY_TIMEOUT).ok()?;
    stream.set_write_timeout(Some(Duration::from_secs(1))).ok()?;
    stream.write_all(&[greeting(), ready(kind)].concat()).ok()?;
    Some(stream)
}

/// A subscription to `topic` as a ZMTP 3.0 message. It is written directly to a TCP socket, because a libzmq
/// client would store the topic in a trie as deep as the topic is long.
fn subscription(topic: &[u8]) -> Vec<u8> {
    let mut message = vec![0x02];
    message.extend((topic.len() as u64 + 1).to_be_bytes());
    message.push(1);
    message.extend(topic);
    message
}

/// Subscribes to topics of several megabytes.
pub(super) fn long_topics(target: &AttackTarget, rng: &mut SimRng) {
    let Some(mut stream) = peer(target.kv_events, "SUB") else { return };
    for _ in 0..rng.between(1, 8) {
        let topic = vec![b'x'; rng.scaled(1_000, TOPIC_BYTES) as usize];
        if stream.write_all(&subscription(&topic)).is_err() {
            return; // The server may close the connection.
        }
    }
    std::thread::sleep(Duration::from_millis(200));
}

/// Subscribes to tens of thousands of topics on one connection.
pub(super) fn many_topics(target: &AttackTarget, rng: &mut SimRng) {
    let Some(mut stream) = peer(target.kv_events, "SUB") else { return };
    let start = rng.next_u64();
    let topics = (0..u64::from(rng.scaled(100, 50_000)))
        .flat_map(|i| subscription(&start.wrapping_add(i * 7919).to_be_bytes()));
    let _ = stream.write_all(&topics.collect::<Vec<u8>>()); // The server may close the connection.
    std::thread::sleep(Duration::from_millis(200));
}

/// Announces a frame of 100 MiB or more and sends its body until the server closes the connection or until
/// `ENDLESS_BYTES` or `ENDLESS_TIME` is reached.
pub(super) fn endless_frames(target: &AttackTarget, rng: &mut SimRng) {
    let (at, kind) = rng.pick(&[(target.kv_events, "SUB"), (target.kv_replay, "DEALER")]);
    let Some(mut stream) = peer(at, kind) else { return };
    let announced = rng.pick(&[u64::MAX >> 1, 1 << 40, 1 << 32, 100 << 20]);
    let mut head = vec![0x02];
    head.extend(announced.to_be_bytes());
    let (piece, began) = (vec![1; 1 << 16], Instant::now());
    let mut sent = 0;
    let mut open = stream.write_all(&head).is_ok();
    while open && sent < ENDLESS_BYTES && began.elapsed() < ENDLESS_TIME {
        open = stream.write_all(&piece).is_ok();
        sent += piece.len();
    }
}

/// Sends replay requests and never reads the replies.
pub(super) fn replay_flood(target: &AttackTarget, rng: &mut SimRng) {
    let socket = Context::new().socket(zmq::DEALER).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_sndtimeo(200).unwrap();
    socket.connect(&format!("tcp://{}", target.kv_replay)).unwrap();
    for _ in 0..rng.scaled(1, 2_000) {
        let start = rng.pick(&[0, 1, u64::MAX, u64::MAX / 2]).to_be_bytes();
        let frames: &[&[u8]] =
            if rng.chance_per_mille(800) { &[b"", &start] } else { &[b"x", b"", &start] };
        if socket.send_multipart(frames, 0).is_err() {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(100));
}
