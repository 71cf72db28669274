//! Effect of disturbing clients on the server's step times: 100 `/metrics` requests per second, 200 slow
//! stream readers and two KV-event subscribers that never read, compared with the same load without these
//! disturbances.
//!
//! Both kinds of runs, with and without the disturbing clients, have the same 256 streams and publish the
//! same KV events, so that their batches are equal. With disturbance, 200 of the 256 stream clients read a
//! few bytes at a time, a client requests `/metrics` every 10 ms, and the KV-event subscribers never read. A
//! step time is the sum of the times in the server's timing record of the step: scheduling, passing the batch
//! to the executor, and waiting for its output. All runs also send 20 `/livez` requests per second. The order
//! of runs is without, with, with, without, so that other load of the machine affects both kinds equally.

use super::stuck_subscribers::StuckSubscribers;
use crate::deadlines::BoundedJoin as _;
use crate::kv_event_replay;
use crate::small_tokenizer::TokenizerAlphabet;
use crate::test_server::{ServerSetup, TestServer};
use metrics::StepTimingRecord;
use serde_json::json;
use server::ConnectionTimeouts;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const STREAMS: usize = 256;
const SLOW: usize = 200;
const TOKENS: usize = 3_000;
const STEP: Duration = Duration::from_millis(5);
const MEASURED: Duration = Duration::from_secs(6);
const ROUNDS: usize = 8;
/// Maximum number of KV-event batches that the publisher queues for a subscriber that does not read.
const BATCHES_BUFFERED: u32 = 100;
const SCRAPE_EVERY: Duration = Duration::from_millis(10);
const PROBE_EVERY: Duration = Duration::from_millis(50);
/// Number of bytes that a slow stream client reads at a time (the other stream clients read 32 KiB).
const SIP_BYTES: usize = 256;
/// Pause of a slow stream client between two reads.
const SIP_PAUSE: Duration = Duration::from_millis(50);

/// Latencies of the requests of one client, in nanoseconds. The client's task appends to the list during the
/// run.
type SharedLatencies = Arc<Mutex<Vec<u64>>>;

/// Results of one run, in nanoseconds: step times of the server, and latencies of `/metrics` and `/livez`
/// requests.
struct BackgroundCostResult {
    steps: Vec<u64>,
    scrapes: Vec<u64>,
    probes: Vec<u64>,
}

#[test]
#[ignore = "measures times: `just bystanders`"]
fn slow_readers_and_scrapes_do_not_slow_steps() {
    println!("{STREAMS} streams, steps of {} ms on the device", STEP.as_millis());
    println!(
        "| round | background clients | steps | p50 | p99 | scrapes | p50 | p99 | probes | p50 | p99 |"
    );
    println!("|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mut p99s = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for turn in [false, true] {
            let disturbed = turn != (round % 2 == 1);
            let BackgroundCostResult { steps, scrapes, probes } = measure(disturbed);
            let who = if disturbed { "all" } else { "none" };
            let spreads = [steps, scrapes, probes].map(spread);
            let cells =
                spreads.map(|(count, p50, p99)| format!("{count} | {p50:.3} ms | {p99:.3} ms"));
            println!("| {round} | {who} | {} |", cells.join(" | "));
            let p99 = spreads[0].2;
            p99s[usize::from(disturbed)].push(p99);
        }
    }
    let ratios = p99s[0].iter().zip(&p99s[1]).map(|(quiet, disturbed)| disturbed / quiet);
    let ratio = median(ratios.collect());
    let [quiet, disturbed] = p99s.map(median);
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    println!(
        "median p99: {quiet:.3} ms without, {disturbed:.3} ms with them: {:+.1} %; median change of a \
         round: {:+.1} %",
        percent(disturbed / quiet),
        percent(ratio)
    );
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

/// Returns the number of `times` (in nanoseconds), and their median and 99th percentile in milliseconds.
pub(super) fn spread(mut times: Vec<u64>) -> (usize, f64, f64) {
    times.sort_unstable();
    let last = times.len().saturating_sub(1) as f64;
    let at = |share: f64| times.get((last * share) as usize).map_or(0.0, |ns| *ns as f64 * 1e-6);
    (times.len(), at(0.5), at(0.99))
}

fn measure(disturbed: bool) -> BackgroundCostResult {
    let wait = Duration::from_mins(5);
    let setup = ServerSetup {
        alphabet: TokenizerAlphabet::Ascii,
        blocks: 65_536,
        step_time: STEP,
        deadlines: ConnectionTimeouts { header: wait, idle: wait, write: wait },
        kv_events: Some(kv_event_replay::config(&json!({"hwm": BATCHES_BUFFERED}))),
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let address = server.address;
    let source = Arc::clone(&server.app.serving().unwrap().kv_event_sources[0]);
    let stuck = disturbed.then(|| StuckSubscribers::connect(&source.endpoint));
    let done = Arc::new(AtomicBool::new(false));
    let [scrapes, probes] = [(); 2].map(|()| SharedLatencies::default());
    let clients = {
        let (done, scrapes, probes) =
            (Arc::clone(&done), Arc::clone(&scrapes), Arc::clone(&probes));
        std::thread::spawn(move || clients(address, disturbed, &done, scrapes, probes))
    };
    while server.client().stats().running < STREAMS as u32 {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(1)); // By now all streams decode.
    let steps = steps(&server);
    let running = server.client().stats().running as usize;
    assert_eq!(running, STREAMS, "streams ended while they were measured");
    let published = source.counters.batches.load(Ordering::Relaxed);
    assert!(published > steps.len() as u64 / 2, "{published} batches of KV events");
    if let Some(stuck) = stuck {
        stuck.assert_missed_batches(source.counters.seq.load(Ordering::Relaxed));
    }
    done.store(true, Ordering::Relaxed);
    clients.join_bounded();
    let [scrapes, probes] =
        [scrapes, probes].map(|times| std::mem::take(&mut *times.lock().unwrap()));
    BackgroundCostResult { steps, scrapes, probes }
}

/// Runs the stream clients, the `/livez` client and, if `disturbed`, the `/metrics` client on one thread
/// until `done` is true. If `disturbed`, some stream clients read slowly.
fn clients(
    address: SocketAddr,
    disturbed: bool,
    done: &AtomicBool,
    scrapes: SharedLatencies,
    probes: SharedLatencies,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for index in 0..STREAMS {
            tokio::spawn(read(address, disturbed && index < SLOW));
        }
        tokio::spawn(poll_path(address, "/livez", PROBE_EVERY, probes));
        if disturbed {
            tokio::spawn(poll_path(address, "/metrics", SCRAPE_EVERY, scrapes));
        }
        while !done.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
}

/// Returns the duration of each step that the server runs within `MEASURED`, in nanoseconds, from the
/// server's timing records of its steps.
pub(super) fn steps(server: &TestServer) -> Vec<u64> {
    let ring = &server.app.serving().unwrap().metrics.steps.ring;
    let first = ring.newest(1).last().map_or(0, |record| record.step);
    let (start, mut seen) = (Instant::now(), BTreeMap::new());
    while start.elapsed() < MEASURED {
        std::thread::sleep(Duration::from_millis(500));
        seen.extend(ring.newest(usize::MAX).into_iter().map(|record| (record.step, record)));
    }
    let time = |r: &StepTimingRecord| r.plan_ns + r.commit_ns + r.apply_ns + r.send_ns + r.wait_ns;
    seen.values().filter(|record| record.step > first).map(time).collect()
}

pub(super) async fn read(address: SocketAddr, slow: bool) {
    let body = format!(
        r#"{{"prompt":"once upon a time","max_tokens":{TOKENS},"ignore_eos":true,"stream":true}}"#
    );
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    let mut buffer = vec![0_u8; if slow { SIP_BYTES } else { 32 << 10 }];
    // At the end of a run the server closes the connection, so that a read returns 0 bytes or an error.
    while let Ok(1..) = socket.read(&mut buffer).await {
        if slow {
            tokio::time::sleep(SIP_PAUSE).await;
        }
    }
}

async fn poll_path(
    address: SocketAddr,
    path: &'static str,
    every: Duration,
    times: SharedLatencies,
) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut every = tokio::time::interval(every);
    let mut page = Vec::new();
    loop {
        every.tick().await;
        let asked = Instant::now();
        socket.write_all(request.as_bytes()).await.unwrap();
        page.clear();
        while !is_complete(&page) {
            assert!(
                socket.read_buf(&mut page).await.unwrap() > 0,
                "the server closed the connection"
            );
        }
        times.lock().unwrap().push(asked.elapsed().as_nanos() as u64);
    }
}

/// Whether a reply with a content length has arrived completely.
fn is_complete(reply: &[u8]) -> bool {
    let Some(end) = reply.windows(4).position(|w| w == b"\r\n\r\n") else { return false };
    let head = std::str::from_utf8(&reply[..end]).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    reply.len() >= end + 4 + length.unwrap().parse::<usize>().unwrap()
}
