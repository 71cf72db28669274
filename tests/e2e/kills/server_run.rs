//! Runs one server of a kill test: fails its executors as many times as the server survives, then kills the
//! server.

use super::load::{open, send_requests};
use super::logged_server::{ExecutorGroupEvent, LogWatchedServer, LoggedGroupEvent};
use super::report::{KillTestServerReport, ObservedFailure};
use super::rng::KillTestRng;
use super::topologies::{KillTestModels, KillTestTopology};
use crate::http::executor_process::{is_ready, is_zombie, wait_until};
use crate::http::parallel_ranks::ranks_of;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

const CLIENTS: usize = 3;
/// Timeout of operations that take seconds on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);

/// Number of signals of each kind that a kill test sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct SignalCounts {
    pub(super) kills: usize,
    pub(super) stops: usize,
    pub(super) stop_percent: u64,
    /// Number of failures of each executor group of a server; a server survives three failures in ten
    /// minutes.
    pub(super) executor_failures: usize,
}

/// The group of executors to which signals are sent: its server, ranks and log events.
struct KillTargetGroup<'a> {
    server: u32,
    ranks: &'a [u16],
    group_events: Receiver<LoggedGroupEvent>,
    rng: KillTestRng,
}

/// Starts a server under load, kills and stops the executors of its groups, and kills the server.
pub(super) fn run_server(
    models: &KillTestModels,
    topology: KillTestTopology,
    mut rng: KillTestRng,
    wanted: SignalCounts,
) -> KillTestServerReport {
    let replicas = topology.groups().iter().map(|(replica, _)| *replica);
    let (server, mut group_events) = LogWatchedServer::start(&models.flags(topology), replicas);
    let (at, requests) = (server.address, models.requests(topology));
    let stop = AtomicBool::new(false);
    let mut server_run = KillTestServerReport::default();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| KillTestRng::new(rng.bits()))
            .map(|rng| scope.spawn(|| send_requests(at, requests, rng, &stop)))
            .collect();
        let groups: Vec<_> = topology
            .groups()
            .iter()
            .map(|(replica, ranks)| KillTargetGroup {
                server: server.child.id(),
                ranks,
                group_events: group_events.remove(replica).unwrap(),
                rng: KillTestRng::new(rng.bits()),
            })
            .map(|group| scope.spawn(move || group.fail_repeatedly(wanted)))
            .collect();
        let failures: Vec<_> = groups.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            server_run.results.add(client.join().unwrap());
        }
        for seen in failures {
            server_run.failures.extend(seen.unwrap());
        }
    });
    wait_until(TIMEOUT, "ready after all failures", || is_ready(at));
    let _streams: Vec<_> = requests.iter().take(CLIENTS).map(|request| open(at, request)).collect();
    server_run.orphans_exited_after = end(server, &mut rng);
    server_run
}

impl KillTargetGroup<'_> {
    /// Makes the group fail `wanted.executor_failures` times; returns the failures.
    fn fail_repeatedly(mut self, wanted: SignalCounts) -> Vec<ObservedFailure> {
        let mut seen: Vec<ObservedFailure> = Vec::new();
        while seen.len() < wanted.executor_failures {
            thread::sleep(Duration::from_millis(self.rng.below(500)));
            let stops = self.rng.percent(wanted.stop_percent);
            let signal = if stops { Signal::STOP } else { Signal::KILL };
            seen.push(self.fail_once(signal));
            // With a probability of 15 % each time, kills the replacements as well, possibly before they
            // serve.
            while seen.len() < wanted.executor_failures && self.rng.percent(15) {
                thread::sleep(Duration::from_millis(self.rng.below(200)));
                seen.push(self.fail_once(Signal::KILL));
            }
            let failed_at = seen.last().unwrap().failed_at;
            let restored_at = self.wait_for(ExecutorGroupEvent::Restored);
            seen.last_mut().unwrap().restored_after = Some(restored_at - failed_at);
        }
        seen
    }

    /// Sends a signal to one rank, sometimes to all ranks at once, and waits until the server has detected
    /// the failure.
    fn fail_once(&mut self, signal: Signal) -> ObservedFailure {
        let mut pids = Vec::new();
        wait_until(TIMEOUT, "all ranks run", || {
            let ranks = ranks_of(self.server);
            pids = self.ranks.iter().filter_map(|rank| ranks.get(rank).copied()).collect();
            pids.len() == self.ranks.len()
        });
        if pids.len() > 1 && !self.rng.percent(15) {
            let one = self.rng.below(pids.len() as u64) as usize;
            pids = vec![pids[one]];
        }
        let since = Instant::now();
        let sent = pids.iter().filter(|pid| send(**pid, signal)).count();
        let failed_at = self.wait_for(ExecutorGroupEvent::Failed);
        let detected_after = failed_at - since;
        ObservedFailure { signal, sent, detected_after, failed_at, restored_after: None }
    }

    /// Waits for the group's next event of kind `wanted` and returns its time.
    fn wait_for(&self, wanted: ExecutorGroupEvent) -> Instant {
        loop {
            let received = self.group_events.recv_timeout(TIMEOUT);
            let LoggedGroupEvent { at, event } =
                received.unwrap_or_else(|_| panic!("no {wanted:?} within {TIMEOUT:?}"));
            if event == wanted {
                return at;
            }
        }
    }
}

/// Whether the process existed and the signal was sent.
fn send(pid: u32, signal: Signal) -> bool {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).is_ok()
}

/// Kills the server, sometimes while an executor is stopped. Returns the time for which executors outlived
/// it.
fn end(mut server: LogWatchedServer, rng: &mut KillTestRng) -> Duration {
    let executors: Vec<u32> = ranks_of(server.child.id()).into_values().collect();
    assert!(!executors.is_empty(), "no executor runs");
    if rng.percent(25) {
        let one = rng.below(executors.len() as u64) as usize;
        assert!(send(executors[one], Signal::STOP), "the executor exited early");
    }
    server.child.kill().unwrap();
    let is_running = |pid: &u32| fs::exists(format!("/proc/{pid}")).unwrap() && !is_zombie(*pid);
    wait_until(TIMEOUT, "the exit of all executors", || !executors.iter().any(is_running))
}
