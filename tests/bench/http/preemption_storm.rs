//! Concurrent requests whose contexts need ten times the KV cache, so that requests are preempted. The output
//! of each request must equal its output on an idle server.

use crate::http_client::HttpClient;
use crate::test_server::{BLOCK_TOKENS, ServerSetup, TestServer};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const REQUESTS: usize = 100_000;
/// Number of distinct requests. Each is first sent to the idle server to record its expected output.
const KINDS: usize = 400;
/// Number of connections, each with one request at a time.
const CLIENTS: usize = 160;
/// Prompt length in tokens.
const PROMPT_TOKENS: usize = 100;
/// Output length in tokens.
const TOKENS: usize = 60;
/// Number of KV blocks that all concurrent requests need, divided by the number of blocks in the KV cache.
const CACHE_OVERCOMMIT: usize = 10;
/// Maximum time from the last reply until all KV blocks and sequence slots are released.
const IDLE_WITHIN: Duration = Duration::from_secs(5);

fn request(kind: usize) -> Value {
    let prompt: Vec<usize> =
        (0..PROMPT_TOKENS).map(|at| 33 + (kind * 7 + at * kind) % 90).collect();
    let heat = if kind.is_multiple_of(2) { 0.0 } else { 1.0 };
    json!({"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": true, "temperature": heat, "seed": kind})
}

/// Sends a request; returns text and number of output tokens of the reply, and the latency.
fn complete(client: &mut HttpClient, kind: usize) -> ([Value; 2], Duration) {
    let since = Instant::now();
    let reply = client.post("/v1/completions", &request(kind));
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let json = reply.json();
    let told = [json["choices"][0]["text"].clone(), json["usage"]["completion_tokens"].clone()];
    (told, since.elapsed())
}

/// Sends `REQUESTS` requests from `CLIENTS` concurrent clients; returns the latencies, and the number of
/// outputs that differ from `baseline`.
fn run_storm(address: SocketAddr, baseline: &[[Value; 2]]) -> (Vec<Duration>, usize) {
    let (next, changed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let client = || {
        let (mut client, mut times) = (HttpClient::connect(address), Vec::new());
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= REQUESTS {
                return times;
            }
            // 37 and `KINDS` have no common factor, so any `KINDS` consecutive requests are all different.
            let kind = number * 37 % KINDS;
            let (told, took) = complete(&mut client, kind);
            changed.fetch_add(usize::from(told != baseline[kind]), Ordering::Relaxed);
            times.push(took);
        }
    };
    let times: Vec<Duration> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    (times, changed.into_inner())
}

#[test]
#[ignore = "measures times: `just storm`"]
fn storm_of_requests_over_a_tenth_of_the_cache() {
    let each = (PROMPT_TOKENS + TOKENS).div_ceil(BLOCK_TOKENS as usize);
    let blocks = (CLIENTS * each / CACHE_OVERCOMMIT) as u32;
    // The context length must fit in the small KV cache. With the default context length, the server would
    // accept no request.
    let max_model_len = (PROMPT_TOKENS + TOKENS + 1) as u32;
    let server =
        TestServer::start(&ServerSetup { blocks, max_model_len, ..ServerSetup::default() });
    let mut client = HttpClient::connect(server.address);
    let baseline: Vec<[Value; 2]> = (0..KINDS).map(|kind| complete(&mut client, kind).0).collect();
    drop(client);
    let before = server.client().stats();
    let start = Instant::now();
    let (mut times, changed) = run_storm(server.address, &baseline);
    let seconds = start.elapsed().as_secs_f64();
    server.wait_idle(IDLE_WITHIN);
    let after = server.client().stats();
    times.sort_unstable();
    println!(
        "{} of {REQUESTS} ended in {seconds:.1} s, {changed} otherwise than alone; {blocks} blocks where {CLIENTS} \
         clients want {}; {} preemptions in {} steps; p50 {:?}, p99 {:?}, max {:?}",
        times.len(),
        CLIENTS * each,
        after.preemptions_total - before.preemptions_total,
        after.steps_total - before.steps_total,
        times[times.len() / 2],
        times[times.len() * 99 / 100],
        times[times.len() - 1],
    );
    assert_eq!((times.len(), changed), (REQUESTS, 0));
    let preempted = after.preemptions_total - before.preemptions_total;
    assert!(preempted > REQUESTS as u64 / 100, "{preempted} preemptions are no storm");
}
