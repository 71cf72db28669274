//! The soak test: mixed traffic for the requested time, over which memory, file descriptors, latency and KV
//! blocks in use must not grow.
//!
//! `just soak HOURS` prints growth rates; every test run takes a few seconds and checks the growth that is
//! visible in that time.

use crate::http::executor_process::children_as;
use crate::http::server_process::ServerProcess;
use crate::http_client::{HttpClient, get, post};
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EXECUTOR_PROCESS_FLAGS: &[&str] =
    &["--executor", "process", "--threads", "1", "--max-model-len", "512"];
const CLIENTS: u64 = 4;

/// Resources of the server and its executors at one time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResourceSample {
    pub(crate) at: Duration,
    pub(crate) resident_kib: u64,
    pub(crate) descriptors: u64,
    /// 99th percentile of the latency of unary replies since the previous sample.
    pub(crate) p99: Duration,
}

/// Resource samples of a run, and counts at its end.
struct SoakReport {
    samples: Vec<ResourceSample>,
    requests: u64,
    /// Number of replies with a 5xx status.
    failures: u64,
    /// Sum of the KV blocks in use and of the requests running or waiting, after all clients had
    /// disconnected.
    in_use_at_end: f64,
}

/// Sends the next request of one client. Kinds of requests alternate, and each request has a unique number.
/// Returns the latency of a unary reply.
fn send_request(at: SocketAddr, number: u64, failures: &AtomicU64) -> Option<Duration> {
    let prompt = format!("{number} What is {} plus {}?", number % 97, number % 89);
    let since = Instant::now();
    let send = |path: &str, body: Value| {
        let reply = post(at, path, &body);
        if reply.status >= 500 {
            failures.fetch_add(1, Ordering::Relaxed);
            println!("{body}: {} {}", reply.status, String::from_utf8_lossy(&reply.body));
        }
        Some(since.elapsed())
    };
    let chat = json!([{"role": "user", "content": prompt}]);
    match number % 8 {
        0 => send("/v1/completions", json!({"prompt": prompt, "max_tokens": 20, "seed": number})),
        1 => send("/v1/chat/completions", json!({"messages": chat, "max_tokens": 20})),
        2 => send(
            "/v1/completions",
            json!({"prompt": prompt, "max_tokens": 12, "n": 3,
            "temperature": 1.2, "top_p": 0.9, "logprobs": 3, "cache_salt": number.to_string()}),
        ),
        // The grammar is unique, so it is compiled and cached; grammar caches are bounded.
        3 => send(
            "/v1/completions",
            json!({"prompt": prompt, "max_tokens": 16,
            "structured_outputs": {"regex": format!("(a{number}|[0-9]{{1,9}})x?")}}),
        ),
        4 => {
            send("/v1/completions", json!({"prompt": prompt, "max_tokens": -1}));
            send("/v1/chat/completions", json!({"messages": 1}));
            None
        }
        5 | 6 => {
            // A stream that is closed before its first token or after some tokens.
            let mut client = HttpClient::connect(at);
            let body =
                json!({"prompt": prompt, "max_tokens": 300, "stream": true, "ignore_eos": true});
            client.send("POST", "/v1/completions", "", body.to_string().as_bytes());
            for _ in 0..number % 7 {
                let _ = client.read_chunk(); // The stream is closed anyway, so errors are ignored.
            }
            None
        }
        _ => {
            get(at, "/metrics");
            get(at, "/readyz");
            send("/tokenize", json!({"prompt": prompt}));
            None
        }
    }
}

pub(crate) fn sample(pids: &[u32], at: Duration, took: &Mutex<Vec<Duration>>) -> ResourceSample {
    let resident = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let open = |pid: &u32| fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let mut took = std::mem::take(&mut *took.lock().unwrap());
    took.sort_unstable();
    let p99 = took.get(took.len() * 99 / 100).copied().unwrap_or_default();
    let descriptors = pids.iter().map(open).sum::<usize>() as u64;
    ResourceSample { at, resident_kib: pids.iter().map(resident).sum(), descriptors, p99 }
}

/// Returns the sum of the KV blocks in use and of the requests running or waiting, which is 0 without
/// clients.
pub(crate) fn in_use(at: SocketAddr) -> f64 {
    let page = String::from_utf8(get(at, "/metrics").body).unwrap();
    let held = ["hadron:kv_blocks{", "vllm:num_requests_running{", "vllm:num_requests_waiting{"];
    let is_held = |line: &&str| {
        held.iter().any(|name| line.starts_with(name))
            && (!line.starts_with(held[0]) || line.contains("state=\"used\""))
    };
    let value = |line: &str| line.rsplit(' ').next()?.parse::<f64>().ok();
    let lines: Vec<f64> = page.lines().filter(is_held).filter_map(value).collect();
    assert!(lines.len() >= 3, "{page}");
    lines.iter().sum()
}

fn run(time: Duration, every: Duration) -> SoakReport {
    let process = ServerProcess::start(EXECUTOR_PROCESS_FLAGS);
    let at = process.address;
    let (over, requests, failures) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let took = Mutex::new(Vec::new());
    let mut samples = Vec::new();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let number = requests.fetch_add(1, Ordering::Relaxed);
                    if let Some(time) = send_request(at, number, &failures) {
                        took.lock().unwrap().push(time);
                    }
                }
            });
        }
        while start.elapsed() < time {
            std::thread::sleep(every.min(time));
            let mut pids = vec![process.id()];
            pids.extend(children_as("executor", process.id()));
            let now = sample(&pids, start.elapsed(), &took);
            println!("{now:?}, {} requests", requests.load(Ordering::Relaxed));
            samples.push(now);
        }
        over.store(true, Ordering::Relaxed);
    });
    let since = Instant::now();
    while in_use(at) > 0.0 && since.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let [requests, failures] = [requests, failures].map(AtomicU64::into_inner);
    SoakReport { samples, requests, failures, in_use_at_end: in_use(at) }
}

/// Returns the least-squares slope of the value `of` over the last three quarters of the samples, as increase
/// per hour.
pub(crate) fn slope(samples: &[ResourceSample], of: impl Fn(&ResourceSample) -> f64) -> f64 {
    let late = &samples[samples.len() / 4..];
    let n = late.len() as f64;
    let hours = |s: &ResourceSample| s.at.as_secs_f64() / 3_600.0;
    let (x, y) = (late.iter().map(hours).sum::<f64>() / n, late.iter().map(&of).sum::<f64>() / n);
    let over: f64 = late.iter().map(|s| (hours(s) - x) * (of(s) - y)).sum();
    let under: f64 = late.iter().map(|s| (hours(s) - x).powi(2)).sum();
    over / under
}

#[test]
fn slope_of_a_line_is_exact() {
    let line = |minute: u64| ResourceSample {
        at: Duration::from_mins(minute),
        resident_kib: 1_000 + 5 * minute,
        descriptors: 30,
        p99: Duration::ZERO,
    };
    let samples: Vec<ResourceSample> = (0..40).map(line).collect();
    assert!((slope(&samples, |s| s.resident_kib as f64) - 300.0).abs() < 1e-6);
    assert!(slope(&samples, |s| s.descriptors as f64).abs() < 1e-6);
}

#[test]
fn short_soak_leaves_no_resources() {
    let soak = run(Duration::from_secs(8), Duration::from_secs(2));
    assert!(soak.requests > 50, "{}", soak.requests);
    assert_eq!((soak.failures, soak.in_use_at_end), (0, 0.0));
    // The number of open descriptors varies with connected clients, with clients that have just disconnected,
    // and with the processes' own files.
    let descriptors = soak.samples.iter().map(|s| s.descriptors);
    let (least, most) = (descriptors.clone().min().unwrap(), descriptors.max().unwrap());
    assert!(most - least <= 4 * CLIENTS, "{least} to {most} descriptors");
}

/// Runs the soak test for `HADRON_SOAK_HOURS` hours.
#[test]
#[ignore = "takes HOURS hours: `just soak HOURS`"]
#[allow(clippy::disallowed_methods, reason = "the length comes from `just`")]
fn long_soak() {
    let message = std::env::var("HADRON_SOAK_HOURS").ok();
    let hours = message.map_or(1.0, |text| text.parse::<f64>().unwrap());
    let every = Duration::from_secs_f64((hours * 60.0).clamp(4.0, 60.0));
    let soak = run(Duration::from_secs_f64(hours * 3600.0), every);
    let resident = slope(&soak.samples, |s| s.resident_kib as f64);
    let last = soak.samples.last().unwrap();
    println!(
        "{hours} h, {} requests, {} of 5xx; slopes an hour: memory {resident:+.0} KiB ({:+.2} % of \
         {} KiB), descriptors {:+.2} (of {}), p99 {:+.2} ms (of {:.2} ms); left when idle: {}",
        soak.requests,
        soak.failures,
        100.0 * resident / last.resident_kib as f64,
        last.resident_kib,
        slope(&soak.samples, |s| s.descriptors as f64),
        last.descriptors,
        slope(&soak.samples, |s| s.p99.as_secs_f64() * 1e3),
        last.p99.as_secs_f64() * 1e3,
        soak.in_use_at_end,
    );
    assert_eq!((soak.failures, soak.in_use_at_end), (0, 0.0));
}
