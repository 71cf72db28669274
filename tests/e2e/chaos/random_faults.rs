//! Starts servers one after another for the requested number of minutes and injects random faults, drawn from
//! a seed.

use super::{EXECUTOR_PROCESS_FLAGS, body, read_to_end, text_of};
use crate::fault_proxy::{FaultProxy, LinkFault};
use crate::http::executor_process::{children_as, is_ready, send, wait_until};
use crate::http::server_process::ServerProcess;
use crate::http_client::HttpClient;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Minimum number of faults that a run must inject, also on a loaded machine.
const FAULTS_MIN: u64 = 6;
/// Maximum number of executor failures of a replica in ten minutes; the server exits after another one.
const EXECUTOR_FAILURES_MAX: usize = 3;
const TIMEOUT: Duration = Duration::from_mins(1);

/// Random number generator of the faults: splitmix64.
struct ChaosRng(u64);

impl ChaosRng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)) % n
    }
}

/// Counts of servers, faults and replies in a run.
#[derive(Debug, Default)]
struct ChaosCounts {
    servers: u64,
    faults: u64,
    kills: u64,
    stops: u64,
    replies: AtomicU64,
}

fn goes_on(until: Instant, faults: u64) -> bool {
    Instant::now() < until || faults < FAULTS_MIN
}

/// Runs one server: some clients connect through a faulty proxy, one connects directly and has its outputs
/// checked, and the executors get one to three signals.
fn run_server(rng: &mut ChaosRng, until: Instant, tally: &mut ChaosCounts) {
    let mut process =
        ServerProcess::start(&[EXECUTOR_PROCESS_FLAGS, &["--shutdown-timeout", "2s"]].concat());
    let at = process.address;
    let asked = body(20, 150, false);
    let expected = text_of(at, &asked);
    let proxy = FaultProxy::start(at);
    let over = AtomicBool::new(false);
    let answers = &tally.replies;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let text = text_of(at, &asked);
                    assert_eq!(text, expected, "a client without the proxy");
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let mut client = HttpClient::connect(proxy.address);
                    let body = body(30, 200, true).to_string();
                    client.send(
                        "POST",
                        "/v1/completions",
                        "Connection: close\r\n",
                        body.as_bytes(),
                    );
                    let _ = read_to_end(&mut client); // The proxy may have changed or cut the reply.
                }
            });
        }
        let mut losses = 0;
        while goes_on(until, tally.faults) && losses < EXECUTOR_FAILURES_MAX {
            std::thread::sleep(Duration::from_millis(50 + rng.below(400)));
            let fault = match rng.below(6) {
                0 => LinkFault::Delay(Duration::from_millis(1 + rng.below(30))),
                1 => LinkFault::Stall,
                2 => LinkFault::Reset,
                3 => LinkFault::HalfClose,
                4 => LinkFault::Corrupt,
                _ => LinkFault::None,
            };
            proxy.set(fault);
            tally.faults += u64::from(fault != LinkFault::None);
            if rng.below(12) == 0 {
                let stop = rng.below(4) == 0;
                let executors = children_as("executor", process.id());
                for pid in &executors {
                    send(*pid, if stop { "-STOP" } else { "-KILL" });
                }
                wait_until(TIMEOUT, "a replacement executor", || {
                    let now = children_as("executor", process.id());
                    now.iter().any(|pid| !executors.contains(pid)) && is_ready(at)
                });
                losses += 1;
                *(if stop { &mut tally.stops } else { &mut tally.kills }) += 1;
            }
        }
        over.store(true, Ordering::Relaxed);
        proxy.set(LinkFault::Reset);
    });
    tally.servers += 1;
    process.signal("TERM");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));
    assert!(!process.stderr_text().contains("panicked"), "{}", process.stderr_text());
}

/// Injects random faults, drawn from `seed`, for `time`.
fn run(seed: u64, time: Duration) -> ChaosCounts {
    println!("seed {seed}");
    let (mut rng, mut tally) = (ChaosRng(seed), ChaosCounts::default());
    let until = Instant::now() + time;
    while goes_on(until, tally.faults) {
        run_server(&mut rng, until, &mut tally);
        println!("{tally:?}");
    }
    tally
}

#[test]
fn short_chaos_run_changes_no_answer() {
    let tally = run(4, Duration::from_secs(6));
    assert!(tally.replies.into_inner() > 0);
}

/// Injects random faults for `HADRON_CHAOS_MINUTES` minutes.
#[test]
#[ignore = "takes minutes: `just chaos MINUTES`"]
#[allow(clippy::disallowed_methods, reason = "the length comes from `just`")]
fn long_chaos_run() {
    let env_var = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let minutes = env_var("HADRON_CHAOS_MINUTES").unwrap_or(1);
    run(env_var("HADRON_CHAOS_SEED").unwrap_or(1), Duration::from_mins(minutes));
}
