//! A hundred thousand clients that disconnect at random moments: while they send the request head or body,
//! while the request is queued, during prefill, or while tokens are streamed. The server must release all
//! resources of these requests, and clients that stay connected must receive the same output as from an idle
//! server.

use super::many_streams::resident_bytes;
use crate::test_server::{ServerSetup, TestServer};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const CLIENTS: u64 = 100_000;
/// Number of client threads.
const CLIENT_THREADS: u64 = 8;
/// Each client thread sends one request without disconnecting after every `STAYING_ONE_IN` disconnects.
const STAYING_ONE_IN: u64 = 250;
/// Time for which a client waits for bytes before it disconnects.
const CLIENT_TIMEOUT: Duration = Duration::from_millis(20);
/// Maximum time from the last disconnect until the server has released the resources of all clients.
const IDLE_WITHIN: Duration = Duration::from_secs(5);
/// Pause before memory and open descriptors are counted, so that the server can close the last sockets.
const CLOSED: Duration = Duration::from_millis(500);
/// Maximum growth of the server's resident memory per client, in bytes. It is not 0, because the allocator
/// may retain some pages.
const GROWTH_MAX: u64 = 64;

/// Moments at which a client disconnects.
const DISCONNECT_MOMENTS: [&str; 7] = [
    "in the head of the request",
    "in the body",
    "directly after the request",
    "up to 5 ms later",
    "after the first bytes of the reply",
    "after more bytes",
    "after 20 ms without bytes",
];
/// Index in `DISCONNECT_MOMENTS` for a client that received no bytes within `CLIENT_TIMEOUT`.
const TIMED_OUT_MOMENT: usize = 6;

/// Random number generator (splitmix64) that draws the prompts and the moments of the disconnects.
struct DisconnectRng(u64);

impl DisconnectRng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)) % n
    }
}

fn request(prompt: &str, more: &str) -> (String, String) {
    let body = format!(r#"{{"prompt":"{prompt}","ignore_eos":true,{more}}}"#);
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json";
    (format!("{head}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"), body)
}

/// Opens a connection. A failed attempt is repeated: after many connections have closed, no local port may be
/// available for a short time.
fn connect(address: SocketAddr) -> TcpStream {
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Sends a request and disconnects at a random moment; returns the index of the moment in
/// `DISCONNECT_MOMENTS`.
fn disconnect(address: SocketAddr, request_rng: &mut DisconnectRng) -> usize {
    let words = "once upon a time ".repeat(request_rng.below(40) as usize + 1);
    let stream = request_rng.below(4) > 0;
    let n = 1 + request_rng.below(2);
    let (head, body) = request(&words, &format!(r#""max_tokens":500,"n":{n},"stream":{stream}"#));
    let moment = request_rng.below(TIMED_OUT_MOMENT as u64) as usize;
    let mut socket = connect(address);
    let _ = socket.set_read_timeout(Some(CLIENT_TIMEOUT));
    let part = |text: &str, request_rng: &mut DisconnectRng| {
        text[..request_rng.below(text.len() as u64) as usize].to_owned()
    };
    let sent = match moment {
        0 => part(&head, request_rng),
        1 => head + &part(&body, request_rng),
        _ => head + &body,
    };
    // Write errors are ignored, because the client disconnects anyway.
    let _ = socket.write_all(sent.as_bytes());
    if moment == 3 {
        std::thread::sleep(Duration::from_micros(request_rng.below(5_000)));
    }
    let reads = [0, 0, 0, 0, 1, 1 + request_rng.below(8)][moment];
    let mut buffer = [0_u8; 512];
    for _ in 0..reads {
        match socket.read(&mut buffer) {
            Ok(length) if length > 0 => {}
            _ => return TIMED_OUT_MOMENT,
        }
    }
    moment
}

/// Sends a fixed request and reads the whole reply; returns the generated text, which must always be the
/// same.
fn complete(address: SocketAddr) -> String {
    let (head, body) = request("who stays", r#""max_tokens":20,"seed":1"#);
    let mut socket = connect(address);
    socket.write_all((head + &body).as_bytes()).unwrap();
    let mut reply = String::new();
    socket.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    let (_, text) = reply.split_once(r#""text":""#).unwrap();
    text.split_once(r#"","logprobs""#).unwrap().0.to_owned()
}

fn run_clients(address: SocketAddr, seed: u64, expected: &str) -> [u64; DISCONNECT_MOMENTS.len()] {
    let mut request_rng = DisconnectRng(seed);
    let mut left = [0; DISCONNECT_MOMENTS.len()];
    for client in 0..CLIENTS / CLIENT_THREADS / 2 {
        left[disconnect(address, &mut request_rng)] += 1;
        if client % STAYING_ONE_IN == 0 {
            assert_eq!(complete(address), expected);
        }
    }
    left
}

/// Runs one half of all clients on `CLIENT_THREADS` threads; returns the number of disconnects at each moment
/// of `DISCONNECT_MOMENTS`. The benchmark compares memory and descriptors after the first and after the
/// second half.
fn half(address: SocketAddr, seed: u64, expected: &str) -> [u64; DISCONNECT_MOMENTS.len()] {
    let counts: Vec<[u64; DISCONNECT_MOMENTS.len()]> = std::thread::scope(|scope| {
        let seeds = seed..seed + CLIENT_THREADS;
        let crowds: Vec<_> =
            seeds.map(|seed| scope.spawn(move || run_clients(address, seed, expected))).collect();
        crowds.into_iter().map(|crowd| crowd.join().unwrap()).collect()
    });
    std::array::from_fn(|at| counts.iter().map(|left| left[at]).sum())
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
#[ignore = "measures times: `just vanish`"]
fn blocks_are_freed_for_100k_disconnecting_clients() {
    let setup = ServerSetup {
        step_time: Duration::from_millis(1),
        blocks: 4_096,
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let (address, start) = (server.address, Instant::now());
    let expected = complete(address);
    let first = half(address, 0, &expected);
    server.wait_idle(IDLE_WITHIN);
    std::thread::sleep(CLOSED);
    let (memory, open) = (resident_bytes(), descriptors());
    let second = half(address, CLIENT_THREADS, &expected);
    let (seconds, end) = (start.elapsed().as_secs_f64(), Instant::now());
    server.wait_idle(IDLE_WITHIN);
    let forgotten = end.elapsed();
    std::thread::sleep(CLOSED);
    let (after, still_open) = (resident_bytes(), descriptors());
    println!("{CLIENTS} clients disconnected in {seconds:.1} s; idle {forgotten:?} after the last");
    for (at, name) in DISCONNECT_MOMENTS.iter().enumerate() {
        println!("  {} {name}", first[at] + second[at]);
    }
    println!("second half: resident {memory} -> {after} bytes, descriptors {open} -> {still_open}");
    assert!(still_open <= open, "{open} descriptors before, {still_open} after");
    let grown = after.saturating_sub(memory) as u64 / (CLIENTS / 2);
    assert!(grown <= GROWTH_MAX, "{grown} bytes for each client");
    assert_eq!(complete(address), expected);
}

/// Number of streams whose disconnect is timed. The streams run one after another.
const WATCHED: usize = 1_000;
/// Step time of the simulated device.
const STEP: Duration = Duration::from_millis(10);

/// Returns the time from closing a stream's socket until none of the stream's KV blocks is in use.
fn time_until_blocks_are_free(server: &TestServer, number: usize) -> Duration {
    let (head, body) = request(&format!("{number} words"), r#""max_tokens":4000,"stream":true"#);
    let mut socket = connect(server.address);
    socket.write_all((head + &body).as_bytes()).unwrap();
    for _ in 0..=number % 5 {
        assert!(socket.read(&mut [0_u8; 512]).unwrap() > 0);
    }
    assert!(server.client().stats().blocks.in_use > 0);
    let left = Instant::now();
    drop(socket);
    while server.client().stats().blocks.in_use > 0 {
        std::thread::sleep(Duration::from_micros(100));
    }
    left.elapsed()
}

#[test]
#[ignore = "measures times: `just freed`"]
fn time_from_disconnect_to_free_blocks() {
    let server = TestServer::start(&ServerSetup { step_time: STEP, ..ServerSetup::default() });
    let mut times: Vec<Duration> =
        (0..WATCHED).map(|number| time_until_blocks_are_free(&server, number)).collect();
    times.sort_unstable();
    let [p50, p99, max] = [WATCHED / 2, WATCHED * 99 / 100, WATCHED - 1].map(|at| times[at]);
    println!(
        "{WATCHED} clients disconnected from streams of steps of {STEP:?}: no block in use after {p50:?} (p50), {p99:?} (p99), {max:?} \
         (max)"
    );
}
