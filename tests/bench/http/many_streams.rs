//! Ten thousand concurrent streams, for seconds or for the requested number of minutes (`just streams
//! MINUTES`): no event is lost, and the server's memory per stream is bounded.
//!
//! The client is a separate process: one process may not have enough file descriptors for the server's and
//! the client's sockets, and the memory of the client must not be measured.

use crate::bounded_child::{CHILD_TIMEOUT, finish_within};
use crate::hash_model::KvSlotAccess;
use crate::small_tokenizer::TokenizerAlphabet;
use crate::test_server::{BLOCK_TOKENS, ServerSetup, TestServer};
use engine::AdmissionLimits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Barrier;

const STREAMS: usize = 10_000;
/// Maximum resident memory per stream in bytes.
const BYTES_MAX: usize = 50_000;

/// Settings of the benchmark's streams: number of tokens per stream, and interval between two tokens.
struct StreamBenchSettings {
    tokens: usize,
    step_time: Duration,
}

/// Number of tokens and step time of the streams: one token per second for `HADRON_STREAMS_MINUTES` minutes;
/// if the variable is unset, 40 tokens at two tokens per second.
#[allow(clippy::disallowed_methods, reason = "the length comes from `just`")]
fn length() -> StreamBenchSettings {
    let message = std::env::var("HADRON_STREAMS_MINUTES").ok();
    match message.map_or(0, |text| text.parse::<u64>().unwrap()) {
        0 => StreamBenchSettings { tokens: 40, step_time: Duration::from_millis(500) },
        minutes => {
            StreamBenchSettings { tokens: 60 * minutes as usize, step_time: Duration::from_secs(1) }
        }
    }
}

fn setup(length: &StreamBenchSettings) -> ServerSetup {
    // Number of KV blocks for the prompt and the output of a stream, including one partially filled block.
    let blocks = (64 + length.tokens) as u32 / BLOCK_TOKENS + 1;
    ServerSetup {
        slot_access: KvSlotAccess::Untouched,
        alphabet: TokenizerAlphabet::Ascii,
        blocks: STREAMS as u32 * blocks,
        max_num_seqs: STREAMS as u32,
        step_tokens: 2 * STREAMS as u32,
        step_time: length.step_time,
        admission: AdmissionLimits {
            requests: 2 * STREAMS as u64,
            prefill_tokens: u64::MAX,
            bytes: 1 << 30,
        },
        connections: STREAMS as u32 + 10,
        workers: 1,
        ..ServerSetup::default()
    }
}

fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: Some(STREAMS as u64 + 500), ..limit };
    setrlimit(Resource::Nofile, wanted).expect("a descriptor for every stream");
}

#[test]
#[ignore = "measures times: `just streams`"]
fn ten_thousand_streams() {
    allow_descriptors();
    let length = length();
    let (server, tokens) = (TestServer::start(&setup(&length)), length.tokens);
    let before = resident_bytes();
    let start = Instant::now();
    let mut client = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "http::many_streams::many_streams_client", "--ignored", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    writeln!(client.stdin.take().unwrap(), "{}", server.address).unwrap();
    let mut most = before;
    while client.try_wait().unwrap().is_none() {
        most = most.max(resident_bytes());
        std::thread::sleep(Duration::from_millis(100));
    }
    let seconds = start.elapsed().as_secs_f64();
    let output = finish_within(client, CHILD_TIMEOUT, "the client");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let told = text.lines().find_map(|line| line.split_once("COUNTS "));
    let counts = told.unwrap_or_else(|| panic!("{text}")).1;
    let counts: Vec<usize> = counts.split(' ').map(|count| count.parse().unwrap()).collect();
    let &[events, together] = counts.as_slice() else { panic!("{text}") };
    let each = (most - before) / STREAMS;
    println!(
        "{STREAMS} streams of {tokens} tokens, {together} open at once; {events} events in \
         {seconds:.1} s; {each} bytes of resident memory for each"
    );
    server.wait_idle(Duration::from_secs(10));
    assert_eq!(events, STREAMS * (tokens + 2), "one event per token, usage, and the end");
    assert_eq!(together, STREAMS);
    assert!(each <= BYTES_MAX, "{each} bytes");
}

#[test]
#[ignore = "client process, started by the measurement of ten_thousand_streams"]
fn many_streams_client() {
    allow_descriptors();
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    let (events, together) = run(line.trim().parse().unwrap());
    println!("COUNTS {events} {together}");
}

/// Runs all streams. Returns the number of received events, and the number of streams that had started when
/// the first stream ended.
fn run(address: SocketAddr) -> (usize, usize) {
    let tokens = length().tokens;
    let body = format!(
        r#"{{"prompt":"once upon a time","max_tokens":{tokens},"ignore_eos":true,"stream":true,"stream_options":{{"include_usage":true}}}}"#
    );
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length:";
    let request: Arc<str> = format!("{head} {length}\r\n\r\n{body}").into();
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().unwrap();
    runtime.block_on(async {
        let gate = Arc::new(Barrier::new(STREAMS));
        let counts = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let mut tasks = Vec::with_capacity(STREAMS);
        for _ in 0..STREAMS {
            let socket = TcpStream::connect(address).await.unwrap();
            let (gate, request) = (Arc::clone(&gate), Arc::clone(&request));
            let counts = Arc::clone(&counts);
            tasks.push(tokio::spawn(async move {
                gate.wait().await;
                read(socket, &request, &counts.0, &counts.1).await
            }));
        }
        let mut events = 0;
        for task in tasks {
            events += task.await.unwrap();
        }
        (events, counts.1.load(Ordering::Relaxed))
    })
}

/// Reads one stream to its end and returns the number of its events.
async fn read(
    mut socket: TcpStream,
    request: &str,
    begun: &AtomicUsize,
    together: &AtomicUsize,
) -> usize {
    socket.write_all(request.as_bytes()).await.unwrap();
    let (mut events, mut last, mut first) = (0, 0, true);
    loop {
        socket.readable().await.unwrap();
        let mut buffer = [0_u8; 2_048];
        let length = match socket.try_read(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => panic!("{error}"),
        };
        if std::mem::take(&mut first) {
            begun.fetch_add(1, Ordering::Relaxed);
        }
        if length == 0 {
            // The first stream that ends stores the number of streams that have started; streams that end
            // later do not change the stored number.
            let now = begun.load(Ordering::Relaxed);
            let _ = together.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
            return events;
        }
        for &byte in &buffer[..length] {
            events += usize::from(byte == b'\n' && last == b'\n');
            last = byte;
        }
    }
}

/// Resident memory of this process in bytes.
pub(super) fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}
