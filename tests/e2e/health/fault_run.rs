//! One server: its executors are killed as often as it survives, it is paused, and shut down.

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

/// Failures of its executors in ten minutes that a server survives.
const EXECUTOR_FAILURES_MAX: usize = 3;
const TIMEOUT: Duration = Duration::from_mins(1);
const ONE: &[&str] = &["--executor", "process"];
const TWO: &[&str] = &["-tp", "2"];
const EXACT: &[&str] = &["--threads", "1", "--dtype", "float32", "--shutdown-timeout", "2s"];

/// A fault and the results of the probes.
#[derive(Debug)]
pub(super) struct ObservedFault {
    pub(super) kind: &'static str,
    /// Time from the fault to the first probe that reported it.
    pub(super) detected_after: Option<Duration>,
    /// Time from the fault to its end, and from its end to the first probe that reported that.
    duration: Duration,
    pub(super) recovery_detected_after: Option<Duration>,
    /// Probes that were untrue for longer than a second.
    false_probes: Vec<ProbeSample>,
}

impl ObservedFault {
    /// Describes a fault that the probes did not report within `bound` or, if no other tests run, reported
    /// falsely.
    pub(super) fn violation(&self, bound: Duration) -> Option<String> {
        let late = |told: Option<Duration>| told.is_none_or(|after| after > bound);
        // On a busy machine a prober may miss a short fault.
        let unnoticed =
            late(self.detected_after) && self.duration > bound.min(DETECTION_LIMIT * 3 / 2);
        let still = self.kind != SERVER_TERMINATED
            && self.kind != SERVER_KILLED
            && late(self.recovery_detected_after);
        let wrong = bound <= DETECTION_LIMIT && !self.false_probes.is_empty();
        (unnoticed || still || wrong).then(|| format!("{self:?}"))
    }
}

const EXECUTORS_KILLED: &str = "executors killed";
const SERVER_STOPPED: &str = "server stopped";
const SERVER_TERMINATED: &str = "server terminated";
const SERVER_KILLED: &str = "server killed";

fn serves(look: &ProbeSample) -> bool {
    (look.live, look.ready, look.health) == (Some(200), Some(200), Some(200))
}

/// Starts a server and injects faults into it.
pub(super) fn run_server(chance: &mut SimRng) -> Vec<ObservedFault> {
    let ranks = chance.pick(&[ONE, TWO]);
    let mut process = ServerProcess::start(&[ranks, EXACT].concat());
    let watch = HealthProber::start(process.address);
    let mut faults = Vec::new();
    for _ in 0..EXECUTOR_FAILURES_MAX {
        wait_until_healthy(&watch);
        std::thread::sleep(Duration::from_millis(chance.below(200)));
        let busy =
            chance.chance_per_mille(500).then(|| stream_of(process.address, &body(1_000, true)));
        faults.push(kill_executors(&process, &watch, chance));
        drop(busy);
    }
    wait_until_healthy(&watch);
    faults.push(stop_server(&process, &watch));
    wait_until_healthy(&watch);
    let end = if chance.chance_per_mille(500) { SERVER_TERMINATED } else { SERVER_KILLED };
    faults.push(end_server(&mut process, &watch, end));
    faults
}

/// Waits until all probes succeed.
fn wait_until_healthy(watch: &HealthProber) {
    let from = Instant::now();
    wait_until(TIMEOUT, "all is well", || watch.since(from).iter().any(serves));
}

/// Whether a probe reports a live server as dead: by its status, or by no reply for longer than a second.
fn reports_dead(look: &ProbeSample, looks: &[ProbeSample]) -> bool {
    let soon = look.from..look.from + DETECTION_LIMIT;
    let answered = |other: &ProbeSample| other.live == Some(200) && soon.contains(&other.to);
    look.live.map_or_else(|| !looks.iter().any(answered), |status| status != 200)
}

fn after(since: Instant, look: Option<&ProbeSample>) -> Option<Duration> {
    look.map(|look| look.to - since)
}

/// Kills one rank or all. A request sent at once shows by its completion when the replacements serve.
fn kill_executors(
    process: &ServerProcess,
    watch: &HealthProber,
    chance: &mut SimRng,
) -> ObservedFault {
    let ranks: Vec<u32> = ranks_of(process.id()).into_values().collect();
    let victims = if chance.chance_per_mille(500) {
        ranks.clone()
    } else {
        vec![ranks[chance.below(ranks.len() as u64) as usize]]
    };
    let since = Instant::now();
    for pid in &victims {
        // May have exited if the failure of another rank was detected first.
        let _ = kill_process(Pid::from_raw(*pid as i32).unwrap(), Signal::KILL);
    }
    wait_until(TIMEOUT, "an answer of others", || {
        let reply =
            post(process.address, "/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
        let now = ranks_of(process.id());
        reply.status == 200 && !now.is_empty() && !now.values().any(|pid| victims.contains(pid))
    });
    let back = Instant::now();
    wait_until(TIMEOUT, "the next look", || watch.since(back).iter().any(serves));
    let looks = watch.since(since);
    let told = looks.iter().find(|look| look.ready != Some(200));
    let well = looks.iter().find(|look| look.from >= back && serves(look));
    let wrong = looks.iter().filter(|look| {
        let lost = look.from > since + DETECTION_LIMIT && look.to + DETECTION_LIMIT < back;
        reports_dead(look, &looks) || lost && (look.ready == Some(200) || look.health == Some(200))
    });
    let wrong = wrong.copied().collect();
    let (told, well_told) = (after(since, told), after(back, well));
    ObservedFault {
        kind: EXECUTORS_KILLED,
        detected_after: told,
        duration: back - since,
        recovery_detected_after: well_told,
        false_probes: wrong,
    }
}

fn stop_server(process: &ServerProcess, watch: &HealthProber) -> ObservedFault {
    let since = Instant::now();
    process.signal("STOP");
    std::thread::sleep(2 * DETECTION_LIMIT);
    let back = Instant::now();
    process.signal("CONT");
    wait_until(TIMEOUT, "the next look", || watch.since(back).iter().any(serves));
    let looks = watch.since(since);
    let told = looks.iter().find(|look| look.live.is_none());
    let well = looks.iter().find(|look| look.from >= back && serves(look));
    let wrong = looks.iter().filter(|look| {
        let answers = [look.live, look.ready, look.health].iter().any(Option::is_some);
        look.from > since + DETECTION_LIMIT && look.to < back && answers
    });
    let wrong = wrong.copied().collect();
    let (told, well_told) = (after(since, told), after(back, well));
    ObservedFault {
        kind: SERVER_STOPPED,
        detected_after: told,
        duration: back - since,
        recovery_detected_after: well_told,
        false_probes: wrong,
    }
}

/// On SIGTERM: not ready, but alive until the exit, then unreachable. On SIGKILL: unreachable.
fn end_server(
    process: &mut ServerProcess,
    watch: &HealthProber,
    kind: &'static str,
) -> ObservedFault {
    let _stream = stream_of(process.address, &body(1_900, true));
    let since = Instant::now();
    process.signal(if kind == SERVER_TERMINATED { "TERM" } else { "KILL" });
    process.exits_within(TIMEOUT);
    let gone = Instant::now();
    let silent = |look: &ProbeSample| (look.live, look.ready, look.health) == (None, None, None);
    wait_until(TIMEOUT, "a look at nobody", || watch.since(gone).iter().any(silent));
    let looks = watch.since(since);
    let told = looks.iter().find(|look| look.ready != Some(200));
    let wrong = looks.iter().filter(|look| {
        let ready = look.ready == Some(200) || look.health == Some(200);
        let died = kind == SERVER_TERMINATED
            && look.to < gone
            && look.live.is_some_and(|status| status != 200);
        look.from > since + DETECTION_LIMIT && ready || look.from > gone && !silent(look) || died
    });
    let wrong = wrong.copied().collect();
    let lasted = gone - since + DETECTION_LIMIT; // The server is not restarted.
    ObservedFault {
        kind,
        detected_after: after(since, told),
        duration: lasted,
        recovery_detected_after: None,
        false_probes: wrong,
    }
}
