//! Runs one server of the test: kills its executors as many times as the server survives, pauses the server,
//! and shuts it down.

use super::DETECTION_LIMIT;
use super::prober::{HealthProber, ProbeSample};
use crate::http::executor_process::{body, stream_of, wait_until};
use crate::http::parallel_ranks::ranks_of;
use crate::http::server_process::ServerProcess;
use crate::http_client::post;
use crate::rng::SimRng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::time::{Duration, Instant};

/// Number of executor failures in ten minutes that a server survives.
const EXECUTOR_FAILURES_MAX: usize = 3;
const TIMEOUT: Duration = Duration::from_mins(1);
const ONE: &[&str] = &["--executor", "process"];
const TWO: &[&str] = &["-tp", "2"];
const EXACT: &[&str] = &["--threads", "1", "--dtype", "float32", "--shutdown-timeout", "2s"];

/// A fault and the times at which the probes reported its start and its end.
#[derive(Debug)]
pub(super) struct ObservedFault {
    pub(super) kind: &'static str,
    /// Time from the fault to the first probe that reported it.
    pub(super) detected_after: Option<Duration>,
    /// Time from the start of the fault to its end.
    duration: Duration,
    /// Time from the end of the fault to the first probe that reported the recovery.
    pub(super) recovery_detected_after: Option<Duration>,
    /// Samples in which a probe contradicted the server's state for longer than a second.
    false_probes: Vec<ProbeSample>,
}

impl ObservedFault {
    /// Describes the fault if the probes did not report its start and its end within `bound`; with the strict
    /// bound `DETECTION_LIMIT`, also if a probe contradicted the server's state.
    pub(super) fn violation(&self, bound: Duration) -> Option<String> {
        let late = |detected: Option<Duration>| detected.is_none_or(|after| after > bound);
        // A fault shorter than the bound need not be detected: on a busy machine the prober may make no
        // request during the fault.
        let undetected =
            late(self.detected_after) && self.duration > bound.min(DETECTION_LIMIT * 3 / 2);
        let still_reported = self.kind != SERVER_TERMINATED
            && self.kind != SERVER_KILLED
            && late(self.recovery_detected_after);
        let wrong = bound <= DETECTION_LIMIT && !self.false_probes.is_empty();
        (undetected || still_reported || wrong).then(|| format!("{self:?}"))
    }
}

const EXECUTORS_KILLED: &str = "executors killed";
const SERVER_STOPPED: &str = "server stopped";
const SERVER_TERMINATED: &str = "server terminated";
const SERVER_KILLED: &str = "server killed";

fn serves(sample: &ProbeSample) -> bool {
    (sample.live, sample.ready, sample.health) == (Some(200), Some(200), Some(200))
}

/// Starts a server and injects faults into it.
pub(super) fn run_server(rng: &mut SimRng) -> Vec<ObservedFault> {
    let ranks = rng.pick(&[ONE, TWO]);
    let mut process = ServerProcess::start(&[ranks, EXACT].concat());
    let watch = HealthProber::start(process.address);
    let mut faults = Vec::new();
    for _ in 0..EXECUTOR_FAILURES_MAX {
        wait_until_healthy(&watch);
        std::thread::sleep(Duration::from_millis(rng.below(200)));
        let busy =
            rng.chance_per_mille(500).then(|| stream_of(process.address, &body(1_000, true)));
        faults.push(kill_executors(&process, &watch, rng));
        drop(busy);
    }
    wait_until_healthy(&watch);
    faults.push(stop_server(&process, &watch));
    wait_until_healthy(&watch);
    let end = if rng.chance_per_mille(500) { SERVER_TERMINATED } else { SERVER_KILLED };
    faults.push(end_server(&mut process, &watch, end));
    faults
}

/// Waits until all probes succeed.
fn wait_until_healthy(watch: &HealthProber) {
    let from = Instant::now();
    wait_until(TIMEOUT, "all probes succeed", || watch.since(from).iter().any(serves));
}

/// Whether a probe reports a live server as dead: by its status, or by no reply for longer than a second.
fn reports_dead(sample: &ProbeSample, samples: &[ProbeSample]) -> bool {
    let soon = sample.from..sample.from + DETECTION_LIMIT;
    let replied = |other: &ProbeSample| other.live == Some(200) && soon.contains(&other.to);
    sample.live.map_or_else(|| !samples.iter().any(replied), |status| status != 200)
}

fn time_until(since: Instant, sample: Option<&ProbeSample>) -> Option<Duration> {
    sample.map(|sample| sample.to - since)
}

/// Kills one rank or all ranks. The fault ends once a request has completed and the killed processes have
/// been replaced.
fn kill_executors(
    process: &ServerProcess,
    watch: &HealthProber,
    rng: &mut SimRng,
) -> ObservedFault {
    let ranks: Vec<u32> = ranks_of(process.id()).into_values().collect();
    let killed = if rng.chance_per_mille(500) {
        ranks.clone()
    } else {
        vec![ranks[rng.below(ranks.len() as u64) as usize]]
    };
    let since = Instant::now();
    for pid in &killed {
        // The process may have exited already because the server detected the failure of another rank.
        let _ = kill_process(Pid::from_raw(*pid as i32).unwrap(), Signal::KILL);
    }
    wait_until(TIMEOUT, "a reply from the replacements", || {
        let reply =
            post(process.address, "/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
        let now = ranks_of(process.id());
        reply.status == 200 && !now.is_empty() && !now.values().any(|pid| killed.contains(pid))
    });
    let recovered_at = Instant::now();
    wait_until(TIMEOUT, "the next sample", || watch.since(recovered_at).iter().any(serves));
    let samples = watch.since(since);
    let detected = samples.iter().find(|sample| sample.ready != Some(200));
    let recovered = samples.iter().find(|sample| sample.from >= recovered_at && serves(sample));
    let wrong = samples.iter().filter(|sample| {
        let failed =
            sample.from > since + DETECTION_LIMIT && sample.to + DETECTION_LIMIT < recovered_at;
        reports_dead(sample, &samples)
            || failed && (sample.ready == Some(200) || sample.health == Some(200))
    });
    let wrong = wrong.copied().collect();
    let (detected_after, recovery_detected_after) =
        (time_until(since, detected), time_until(recovered_at, recovered));
    ObservedFault {
        kind: EXECUTORS_KILLED,
        detected_after,
        duration: recovered_at - since,
        recovery_detected_after,
        false_probes: wrong,
    }
}

fn stop_server(process: &ServerProcess, watch: &HealthProber) -> ObservedFault {
    let since = Instant::now();
    process.signal("STOP");
    std::thread::sleep(2 * DETECTION_LIMIT);
    let recovered_at = Instant::now();
    process.signal("CONT");
    wait_until(TIMEOUT, "the next sample", || watch.since(recovered_at).iter().any(serves));
    let samples = watch.since(since);
    let detected = samples.iter().find(|sample| sample.live.is_none());
    let recovered = samples.iter().find(|sample| sample.from >= recovered_at && serves(sample));
    let wrong = samples.iter().filter(|sample| {
        let replies = [sample.live, sample.ready, sample.health].iter().any(Option::is_some);
        sample.from > since + DETECTION_LIMIT && sample.to < recovered_at && replies
    });
    let wrong = wrong.copied().collect();
    let (detected_after, recovery_detected_after) =
        (time_until(since, detected), time_until(recovered_at, recovered));
    ObservedFault {
        kind: SERVER_STOPPED,
        detected_after,
        duration: recovered_at - since,
        recovery_detected_after,
        false_probes: wrong,
    }
}

/// Ends the server and checks the probes. After SIGTERM, they must report not ready but alive until the exit,
/// and be unreachable after the exit; after SIGKILL, they must be unreachable.
fn end_server(
    process: &mut ServerProcess,
    watch: &HealthProber,
    kind: &'static str,
) -> ObservedFault {
    let _stream = stream_of(process.address, &body(1_900, true));
    let since = Instant::now();
    process.signal(if kind == SERVER_TERMINATED { "TERM" } else { "KILL" });
    process.exits_within(TIMEOUT);
    let exited_at = Instant::now();
    let unreachable =
        |sample: &ProbeSample| (sample.live, sample.ready, sample.health) == (None, None, None);
    wait_until(TIMEOUT, "an unreachable server", || watch.since(exited_at).iter().any(unreachable));
    let samples = watch.since(since);
    let detected = samples.iter().find(|sample| sample.ready != Some(200));
    let wrong = samples.iter().filter(|sample| {
        let ready = sample.ready == Some(200) || sample.health == Some(200);
        let died = kind == SERVER_TERMINATED
            && sample.to < exited_at
            && sample.live.is_some_and(|status| status != 200);
        sample.from > since + DETECTION_LIMIT && ready
            || sample.from > exited_at && !unreachable(sample)
            || died
    });
    let wrong = wrong.copied().collect();
    // The server is not restarted, so no recovery is observed. The fault lasts until `DETECTION_LIMIT` after
    // the exit, when the probes must have reported it.
    let duration = exited_at - since + DETECTION_LIMIT;
    ObservedFault {
        kind,
        detected_after: time_until(since, detected),
        duration,
        recovery_detected_after: None,
        false_probes: wrong,
    }
}
